"""The file system as a run writes to it: files that appear whole or not at all, reads that outlast a short failure."""

from reprise.atomic import FileCalls, atomic_output, make_folders, replace_file, temporary_of
from reprise.regular_file import SMALL_BYTES, is_file_name, is_url, open_regular, read_regular
from reprise.storage.files import FILE_SYSTEM, Files, cannot_write, describe_free_space
from reprise.storage.patience import Patience, PatientFiles, failed_read, is_damage, unreadable
from reprise.storage.shared_folder import on_this_host, why_unseen
from reprise.stores.location import files_of, is_stored, location
from reprise.stores.url import is_store_url
