"""Aborts multipart uploads begun by a dead process: S3 keeps and bills their parts until then.

obstore has no such call, so boto3 makes it where it is installed. Other stores drop the parts by themselves: Azure
after seven days, Google's by a rule of the bucket.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Collection

from reprise.stores.url import StoreUrl

_log = logging.getLogger(__name__)


def abort_uploads(folder: StoreUrl, names: Collection[str]) -> int:
    """Abort the unfinished uploads of these files of a folder; return how many there were, 0 for other stores than S3.

    No other process may upload them meanwhile. A refusal of the store is logged.
    """
    if not folder.root.startswith("s3://") or importlib.util.find_spec("boto3") is None:
        return 0
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    bucket, keys, count = folder.root.removeprefix("s3://"), {folder.child(name).key for name in names}, 0
    try:
        client = boto3.client("s3")
        for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{folder.key}/"):
            for upload in page.get("Uploads", []):
                if upload["Key"] in keys:
                    client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
                    count += 1
    except (BotoCoreError, ClientError) as error:
        _log.warning(
            "unfinished uploads below %s, if there are any, stay: %s", folder, error
        )  # some stores lack the call
    return count
