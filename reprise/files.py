"""The file system as a run writes to it: files that appear whole or not at all, reads that outlast a short failure."""

from reprise.atomic import FileCalls as FileCalls
from reprise.atomic import atomic_output as atomic_output
from reprise.atomic import make_folders as make_folders
from reprise.atomic import replace_file as replace_file
from reprise.atomic import temporary_of as temporary_of
from reprise.regular_file import SMALL_BYTES as SMALL_BYTES
from reprise.regular_file import is_file_name as is_file_name
from reprise.regular_file import is_url as is_url
from reprise.regular_file import open_regular as open_regular
from reprise.regular_file import read_regular as read_regular
from reprise.storage.files import FILE_SYSTEM as FILE_SYSTEM
from reprise.storage.files import Files as Files
from reprise.storage.files import cannot_write as cannot_write
from reprise.storage.files import describe_free_space as describe_free_space
from reprise.storage.patience import Patience as Patience
from reprise.storage.patience import PatientFiles as PatientFiles
from reprise.storage.patience import failed_read as failed_read
from reprise.storage.patience import is_damage as is_damage
from reprise.storage.patience import unreadable as unreadable
from reprise.storage.shared_folder import on_this_host as on_this_host
from reprise.storage.shared_folder import why_unseen as why_unseen
from reprise.stores.location import files_of as files_of
from reprise.stores.location import is_stored as is_stored
from reprise.stores.location import location as location
from reprise.stores.url import is_store_url as is_store_url
