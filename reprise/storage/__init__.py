"""The file system under a checkpoint: calls, retries, locks, folders and threads.

Eager imports: none is slow, and nearly every program uses most of them.
"""

from reprise.storage.atomic import atomic_output as atomic_output
from reprise.storage.atomic import make_folders as make_folders
from reprise.storage.atomic import replace_file as replace_file
from reprise.storage.atomic import temporary_of as temporary_of
from reprise.storage.files import FILE_SYSTEM as FILE_SYSTEM
from reprise.storage.files import Files as Files
from reprise.storage.files import cannot_write as cannot_write
from reprise.storage.files import describe_free_space as describe_free_space
from reprise.storage.folder import TRACKER as TRACKER
from reprise.storage.folder import WEIGHTS as WEIGHTS
from reprise.storage.folder import CheckpointFolder as CheckpointFolder
from reprise.storage.folder import FolderTerms as FolderTerms
from reprise.storage.folder import is_iteration_name as is_iteration_name
from reprise.storage.folder import iteration_name as iteration_name
from reprise.storage.folder import iteration_of as iteration_of
from reprise.storage.folder import named_iteration as named_iteration
from reprise.storage.folder import shown_name as shown_name
from reprise.storage.holds import HOLD as HOLD
from reprise.storage.holds import Hold as Hold
from reprise.storage.holds import file_system_time as file_system_time
from reprise.storage.json_file import MAX_INTEGER as MAX_INTEGER
from reprise.storage.json_file import Document as Document
from reprise.storage.json_file import Json as Json
from reprise.storage.json_file import dumps as dumps
from reprise.storage.json_file import finite_number as finite_number
from reprise.storage.json_file import integer as integer
from reprise.storage.json_file import shown as shown
from reprise.storage.lock import FolderLock as FolderLock
from reprise.storage.lock import is_locked as is_locked
from reprise.storage.paths import IS_URL as IS_URL
from reprise.storage.paths import exists as exists
from reprise.storage.paths import is_dir as is_dir
from reprise.storage.paths import is_file as is_file
from reprise.storage.paths import is_file_name as is_file_name
from reprise.storage.paths import is_symlink as is_symlink
from reprise.storage.paths import is_url as is_url
from reprise.storage.paths import lexists as lexists
from reprise.storage.paths import matching as matching
from reprise.storage.paths import open_regular as open_regular
from reprise.storage.paths import read_regular as read_regular
from reprise.storage.patience import failed_read as failed_read
from reprise.storage.patience import is_damage as is_damage
from reprise.storage.patience import retry as retry
from reprise.storage.patience import unreadable as unreadable
from reprise.storage.patience import with_retries as with_retries
from reprise.storage.progress_line import log_progress as log_progress
from reprise.storage.shared_folder import on_this_host as on_this_host
from reprise.storage.shared_folder import why_unseen as why_unseen
