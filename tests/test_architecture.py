"""The rules of the source, held by reading its syntax: layers, imports, sizes, nothing that unpickles.

Every rule is a function from sources to complaints, and is shown to complain about a source that breaks it.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from pathlib import Path
from typing import get_type_hints

import numpy
import pytest

from reprise import torch_private
from trainer.config.schema import Config

ROOT = Path(__file__).parents[1]
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_TEST_NAME = 60
# Words of docstrings that hide a subject, and how often 1,000 words may have them.
MAX_PER_1000 = {"what": 3, "that": 7, "one": 4}
# Local names that say nothing of a value: participles, pronouns, adverbs. A noun says what it is.
VAGUE_NAMES = frozenset(
    re.findall(
        r"\w+",
        "found known mine own kept whole odd said how theirs ours one other others rest there here taken given wanted "
        "asked named done gone left shown near both made held sent picked opened written loaded",
    )
)
# By package, of 1,000 names. An exception is the noun of its module, such as a half of a Feistel network.
MAX_VAGUE_PER_1000 = {"reprise": 5, "trainer": 1, "models": 0, "scripts": 0}
NOUNS_BY_MODULE = {
    "reprise.errors": {"found"},
    "trainer.commands.checkpoint": {"whole"},
    "trainer.data.order": {"left"},
}


def layers_of(text: str) -> list[list[str]]:
    """Return the modules and packages of each layer, a line of the text each."""
    return [line.split() for line in text.replace("\\\n", "").splitlines() if line]


# From bottom to top: a module imports from lower layers, and within its own package.
LAYERS = layers_of("""
models trainer reprise trainer.config.suggest trainer.compare.text_table trainer.memory trainer.record \
    trainer.run trainer.saves trainer.schedules trainer.start trainer.training
trainer.checkpoint trainer.errors trainer.workers trainer.metrics.json_lines trainer.record.versions \
    trainer.schedules.batch_size trainer.optim.exact_sum trainer.parallel.lanes trainer.schedules.progress \
    trainer.schedules.lr trainer.parallel.topology
trainer.metrics.log_file
trainer.commands.arguments trainer.compare trainer.data
trainer.config.terms trainer.interop.hf.config
trainer.config trainer.record.data_origin trainer.launch
trainer.optim.table trainer.launch.control
trainer.record.resume_rules
trainer.record.environment trainer.memory.needs trainer.metrics trainer.optim trainer.parallel \
    trainer.saves.mirror trainer.run.random trainer.run.run_data trainer.record.run_record
trainer.doctor trainer.follow trainer.publish trainer.report
trainer.run.state trainer.start.journal
trainer.run.batch_loaders trainer.generate trainer.run.parallelize trainer.saves.targets \
    trainer.training.step
trainer.run.inputs
trainer.run.build trainer.memory.dry_run
trainer.run.fitting trainer.start.identity trainer.training.evaluate trainer.training.rewind
trainer.interop
trainer.start.source
trainer.start.decide
trainer.start.base
trainer.training.loop trainer.start.fill
trainer.train_command trainer.steps
trainer.__main__
trainer.commands
scripts
""")

LIBRARY = "reprise"
# The same within reprise. Saving and loading are in one layer, so neither imports the other.
LIBRARY_LAYERS = layers_of("""
reprise.errors reprise.lazy
reprise.torch_private
reprise.storage
reprise.format
reprise.tensors reprise.stores
reprise.ranks
reprise.commit
reprise.saving reprise.loading
reprise.saving.checkpointer
reprise.saving.program_end
reprise.local
reprise.management
reprise.nested
reprise.api
reprise.async_saver
reprise.integrations
reprise
reprise.__main__
""")

# What others may import of reprise: the library, its errors, and the names that each room offers. Its unit tests may
# import any module.
FRONT = {LIBRARY, f"{LIBRARY}.errors", f"{LIBRARY}.torch_private", f"{LIBRARY}.storage.json_file"} | {
    f"{LIBRARY}.{room}"
    for room in "ranks storage format tensors nested saving loading commit local stores management".split()  # noqa: SIM905
}
# Modules and packages that measure parts of reprise, break them or count their calls, and the parts.
PARTS_UNDER_TEST = {
    "scripts.bench": "commit format",
    "scripts.faults": "format.manifest loading.blocks",
    "tests.crash": "commit format loading local storage tensors",
    "tests.cuda": "commit format nested saving tensors",
    "tests.distributed": "format.manifest nested saving.plan saving.snapshot storage",
    "tests.fakes": "format.box saving.snapshot storage.worker",
    "tests.golden": "saving.plan",
    "tests.local_folders": "loading.blocks",
    "tests.resume": "format.manifest",
    "tests.simulated": "tensors",
    "tests.stores": "format stores",
}

# Where the store of this machine is chosen; every other module of the library is handed a store, so that one of another
# kind is one class with the interface of `Files`. First the calls and constructors of the library, then programs.
STORE = ("reprise.storage.files", "FILE_SYSTEM")
CHOOSES_STORE = (
    "reprise.storage",
    "reprise.saving.checkpointer",
    "reprise.local.local_checkpointer",
    "reprise.loading.restorer",
    "reprise.management",
    "reprise.nested.calls",
    "reprise.storage.lock",
    "reprise.stores.child",
    "reprise.stores.locations",
    "reprise.stores.mirror",
    "reprise.stores.mirror_pass",
    "reprise.stores.upload",
    "scripts",
    "trainer",  # a run's folders lie on this machine
)

# The calls that touch a path, beside the questions that a path of a store answers too (`reprise.stores.path`).
PATH_CALLS = re.compile(
    r"(?:open|shutil\.\w+|os\.path\.(?:l?exists|is\w+|get\w+|same\w+|realpath)"
    r"|os\.(?:open|l?stat|listdir|scandir|rename|replace|unlink|remove|rmdir|mkdir|makedirs|link|symlink|access|utime"
    r"|truncate|statvfs|walk|chmod)"
    r"|(?!os\b).*\.(?:open|unlink|touch|mkdir|rmdir|(?:read|write)_(?:text|bytes)|symlink_to|hardlink_to|chmod))"
)
# Who makes them in the library: the calls of `Files`, what holds on a mounted file system alone, the other kind of
# store, the memory of a host, and a file that a caller hands over.
TOUCHES_PATHS = (
    "reprise.storage.atomic",
    "reprise.storage.paths",
    "reprise.storage.files",
    "reprise.storage.holds",
    "reprise.storage.lease",
    "reprise.storage.lock",
    "reprise.storage.shared_folder",
    "reprise.stores",
    "reprise.saving.column_sharing",
    "reprise.nested.folder_files",
)

# Questions that `reprise.storage.paths` asks in place of pathlib, and who asks pathlib: a path of a store answers them
# itself, and the command finds its packages before it imports the library.
QUESTIONS = re.compile(r"os\.path\.(?:l?exists|is(?:dir|file|link))|.*\.(?:glob|rglob|iglob)")
PATHLIB = ("exists", "is_dir", "is_file", "is_symlink")
ASKS_PATHLIB = ("reprise.storage.paths", "reprise.stores.path", "reprise.__main__", "scripts")
# Where a failure costs nothing: a size in a listing, the names in /proc, a tokenizer that the checkpoint has too, a
# folder that the doctor makes, and patterns whose folders are listed before.
ANSWERS_NO = (
    "reprise.management.listing",
    "reprise.storage.holds",
    "trainer.config.load_saved",
    "trainer.doctor.looks",
    "trainer.data.sources",
)

# What a package may import besides the standard library and itself.
ALLOWED = {
    "models": "torch",
    "trainer.data": "numpy pyarrow reprise.errors reprise.storage reprise.stores tokenizers torch tqdm trainer.workers "
    "xxhash zstandard",
    "reprise": "numpy obstore torch xxhash",
}

# Libraries, and the modules or packages that may import each. tensorboard requires protobuf: its events are messages.
ONLY_IN = {
    "hydra": "trainer.config.compose trainer.config.overrides",
    "omegaconf": "trainer.config.compose",
    "matplotlib": "trainer.compare.plot",
    "pyarrow": "trainer.data.text_file",
    "zstandard": "trainer.data.text_file",
    "obstore": "reprise.stores.client",
    "tensorboard": "trainer.compare.events trainer.metrics.event_file",
    "wandb": "trainer.publish.wandb_tracker",
    "swanlab": "trainer.publish.swanlab_tracker",
    "mlflow": "trainer.publish.mlflow_tracker",
    "trackio": "trainer.publish.trackio_tracker",
    "requests": "trainer.publish.mlflow_tracker trainer.publish.swanlab_tracker",
    "yaml": "trainer.compare.read trainer.config.compose trainer.config.megatron_flags",
    "torch.distributed.tensor": """
        reprise.torch_private reprise.tensors.live trainer.interop.dcp.by_rank trainer.parallel
    """,
}

# The modules with broad handlers that hand on what they catch, by exception.
HANDED_ON = {
    "BaseException": """
        reprise.async_saver
        reprise.saving.checkpointer
        reprise.ranks.channel
        reprise.ranks.joint_call
        reprise.commit.protocol
        reprise.loading.restorer
        reprise.saving.program_end
        reprise.saving.save_job
        reprise.saving.snapshot
        reprise.saving.writer
        reprise.storage.lease
        reprise.storage.worker
        trainer.train_command
    """,
    "Exception": """
        reprise.loading.restorer
        reprise.nested.modules
        reprise.stores.child
        trainer.config.compose
        trainer.data.text_file
        trainer.metrics.run_log
    """,
}


PICKLING_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
PICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
# The benchmark measures torch's own way of saving beside ours, and loads only the file that it has just written: these
# two names, in this module, and nothing else of what pickles.
MEASURED_AS_A_PEER = {("scripts.bench.ways", "torch.save"), ("scripts.bench.ways", "torch.load")}
# Megatron and transformers read these files with torch.load: they are written in that form, from plain data.
WRITTEN_FOR_OTHERS = {(f"trainer.interop.{name}", "torch.save") for name in ("megatron.export", "hf.trainer_export")}
# Other programs' pickles are read by torch's reader of weights, and by an unpickler that admits the names listed there.
ADMITS_BY_NAME = {("trainer.interop.torch_file", name) for name in ("pickle", "pickle.Unpickler", "torch.load")}
CODE_RUNNERS = {"eval", "exec", "compile", "__import__"}

# Of os, atexit and named tuples.
PRIVATE_OF_OTHERS = {"_exit", "_run_exitfuncs", "_asdict"}

# Dependencies that no module imports, and why they are there. One that is imported does not belong here.
NOT_IMPORTED = {
    "accelerate": "two programs in examples/ import it, which tests/resume/test_examples.py runs",
    "moto": "tests/stores starts its server as a process",
    "setuptools": "tests/resume/test_wheel.py builds a wheel without build isolation",
}
IMPORT_NAMES = {
    "hydra-core": "hydra",
    "megatron-core": "megatron.core",
    "mlflow-skinny": "mlflow",
    "pyyaml": "yaml",
    "torch-checkpointing": "torch_checkpointing",
}
# Extras that serve the project's own tests and pages.
OWN_EXTRAS = {"test", "check", "docs", "corpus", "loops", "interop", "eval"}


@dataclass(frozen=True)
class Source:
    """One Python file: its dotted module name and its text."""

    module: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    def entry_of(self, table: Sequence[Sequence[str]], root: str) -> str:
        """Return the longest entry of a table of layers that this module is or lies in, or an empty string.

        Args:
            root: the package that the table divides; its own entry means its `__init__` alone.
        """
        names = [name for layer in table for name in layer]
        fitting = [n for n in names if self.module == n or (n != root and self.module.startswith(n + "."))]
        return max(fitting, key=len, default="")

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @cached_property
    def import_names(self) -> list[tuple[str, str]]:
        """Return each imported name in full, and the module it comes from."""
        names = []
        for node in self.nodes:
            if isinstance(node, ast.Import):
                names += [(alias.name, alias.name) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                names += [(f"{base}.{alias.name}", base) for alias in node.names]
        return names

    @cached_property
    def imports(self) -> set[str]:
        """Return the dotted names this module imports; of `from a import b` both `a` and `a.b`."""
        return {name for names in self.import_names for name in names}


Rule = Callable[[Sequence[Source]], list[str]]


def read_sources(*folders: str) -> list[Source]:
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found.append(Source(".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")))
    return found


def imported_modules(source: Source, known: set[str]) -> set[str]:
    """Return the project's own modules that a source imports; importing a name from a package means the package."""
    modules = {full if full in known else package for full, package in source.import_names}
    return (modules & known) - {source.module}


def is_or_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def layers(sources: Sequence[Source]) -> list[str]:
    """Imports point down, and every module has a layer."""
    return _upward_imports(sources, LAYERS, "trainer")


def library_layers(sources: Sequence[Source]) -> list[str]:
    """Imports within reprise point down, but for the names that a room offers; saving does not import loading."""
    inside = [source for source in sources if is_or_in(source.module, LIBRARY) and source.module not in FRONT]
    return _upward_imports(inside, LIBRARY_LAYERS, LIBRARY)


def front(sources: Sequence[Source]) -> list[str]:
    """Others import reprise and its rooms, not the modules within a room."""
    known = {source.module for source in PRODUCT if is_or_in(source.module, LIBRARY)}
    found = []
    for source in sources:
        if is_or_in(source.module, LIBRARY) or is_or_in(source.module, f"tests.unit.{LIBRARY}"):
            continue
        for target in sorted(imported_modules(source, known) - FRONT):
            parts = {
                part
                for user, names in PARTS_UNDER_TEST.items()
                if is_or_in(source.module, user)
                for part in names.split()
            }
            if not any(is_or_in(target, f"{LIBRARY}.{part}") for part in parts):
                found.append(f"{source.module} imports {target}, which is neither reprise nor one of its rooms")
    return found


def _upward_imports(sources: Sequence[Source], table: Sequence[Sequence[str]], root: str) -> list[str]:
    height = {name: number for number, layer in enumerate(table) for name in layer}
    by_name = {source.module: source for source in sources}
    found = []
    for source in sources:
        if not (entry := source.entry_of(table, root)):
            found.append(f"{source.module} is in no layer")
            continue
        for target in imported_modules(source, set(by_name)):
            other = by_name[target].entry_of(table, root)
            if other != entry and height.get(other, -1) >= height[entry]:
                found.append(f"{source.module} imports {target}, which is not below it")
    return found


def private_torch(sources: Sequence[Source]) -> list[str]:
    """One module imports private names of torch; models import nothing of reprise and have one name of their own."""
    return [
        f"{source.module} imports {name}: take it from reprise.torch_private"
        for source in sources
        for name, _ in source.import_names
        if name.startswith("torch.") and "._" in name
        if (source.module, name) != ("models.layers", "torch._compile._disable_dynamo")
        if source.module != "reprise.torch_private" and not is_or_in(source.module, "scripts")
    ]


def private_members(sources: Sequence[Source]) -> list[str]:
    """Private members of others' objects are torch's, as listed in reprise.torch_private, or in a list above."""
    nodes = [node for source in sources for node in source.nodes]
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    listed = {*" ".join(torch_private.MEMBERS.values()).split(), *PRIVATE_OF_OTHERS}
    return [
        f"{source.module} uses {node.attr}: list it in reprise.torch_private"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr) and node.attr not in own | listed
        if not is_or_in(source.module, "scripts") and source.module != "reprise.integrations.accelerate"
    ]


def no_cycles(sources: Sequence[Source]) -> list[str]:
    """No module imports itself by way of others."""
    known = {source.module for source in sources}
    graph = {source.module: imported_modules(source, known) for source in sources}
    while leaves := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in leaves}
    return [f"{name} is in, or above, a cycle of imports" for name in sorted(graph)]


def foreign_imports(sources: Sequence[Source]) -> list[str]:
    """models, trainer/data and reprise stand on few legs; some libraries have one door."""
    found = []
    for source in sources:
        for name in sorted(source.imports):
            if name.startswith("."):
                found.append(f"{source.module} has a relative import: {name}")
            for package, allowed in ALLOWED.items():
                is_known = name.split(".")[0] in sys.stdlib_module_names or is_or_in(name, package)
                if (
                    is_or_in(source.module, package)
                    and not is_known
                    and not any(is_or_in(name, a) for a in allowed.split())
                ):
                    found.append(f"{source.module} imports {name}, which {package} may not")
            for library, doors in ONLY_IN.items():
                if is_or_in(name, library) and not any(is_or_in(source.module, door) for door in doors.split()):
                    found.append(f"{source.module} imports {name}, which only {doors} may")
    return found


def stores_are_handed_down(sources: Sequence[Source]) -> list[str]:
    """The store of this machine is made once, and chosen where a program or a call of the library begins."""
    module, name = STORE
    complaints = []
    for source in sources:
        if source.module == module or is_or_in(source.module, "scripts"):
            continue
        if any(isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "Files" for n in source.nodes):
            complaints.append(f"{source.module} makes a store, in place of taking one")
        is_named = any(imported.endswith(f".{name}") for imported in source.imports)
        if is_named and not any(is_or_in(source.module, place) for place in CHOOSES_STORE):
            complaints.append(f"{source.module} chooses the store of this machine, in place of taking one")
    return complaints


def paths_are_touched_by_stores(sources: Sequence[Source]) -> list[str]:
    """The library reads and writes through `Files`: a store of another kind is a class of it, and one of paths."""
    found = []
    for source in sources:
        if not is_or_in(source.module, LIBRARY) or any(is_or_in(source.module, owner) for owner in TOUCHES_PATHS):
            continue
        calls = {ast.unparse(node.func): node.lineno for node in source.nodes if isinstance(node, ast.Call)}
        for name, line in calls.items():
            if PATH_CALLS.fullmatch(name):
                found.append(f"{source.module}:{line} calls {name} beside Files")
    return found


def failures_are_no_answers(sources: Sequence[Source]) -> list[str]:
    """A file system that fails is not taken for one without the file, as newer Pythons do in pathlib."""
    found = []
    for source in sources:
        if any(is_or_in(source.module, owner) for owner in ASKS_PATHLIB):
            continue
        for node in source.nodes:
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            is_method = node.func.attr in PATHLIB and not node.args and not node.keywords
            is_other = QUESTIONS.fullmatch(ast.unparse(node.func)) and source.module not in ANSWERS_NO
            if is_method or is_other:
                found.append(f"{source.module}:{node.lineno} asks with {ast.unparse(node.func)}")
    return found


def sizes(sources: Sequence[Source]) -> list[str]:
    """Modules and functions are short."""
    found = []
    for source in sources:
        lines = len(source.text.splitlines())
        if lines > MAX_MODULE_LINES:
            found.append(f"{source.module} has {lines} lines")
        for function in source.functions:
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{source.module}.{function.name} has {length} lines")
    return found


def docstrings(sources: Sequence[Source]) -> list[str]:
    """Modules, public classes and public functions are explained; a method of one line may speak for itself.

    An override has the docstring of its base.
    """
    classes = {node.name: node for source in sources for node in source.nodes if isinstance(node, ast.ClassDef)}
    found = []
    for source in sources:
        if not ast.get_docstring(source.tree):
            found.append(f"{source.module} has no docstring")
        for node in source.tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not _is_explained(node):
                found.append(f"{source.module}.{node.name} has no docstring")
            for method in node.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else []:
                if not isinstance(method, ast.FunctionDef) or _is_explained(method) or len(method.body) == 1:
                    continue
                if not _is_explained_by_base(node, method.name, classes):
                    found.append(f"{source.module}.{node.name}.{method.name} has no docstring")
    return found


def _is_explained_by_base(node: ast.ClassDef, method: str, classes: Mapping[str, ast.ClassDef]) -> bool:
    names = (ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases)
    for base in (classes[name] for name in names if name in classes):
        defined = [member for member in base.body if isinstance(member, ast.FunctionDef) and member.name == method]
        if any(map(ast.get_docstring, defined)) or _is_explained_by_base(base, method, classes):
            return True
    return False


def _is_explained(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> bool:
    return node.name.startswith("_") or ast.get_docstring(node) is not None


def nothing_runs_code(sources: Sequence[Source]) -> list[str]:
    """No pickle in any of its forms, and nothing that turns data into code."""
    return [line for source in sources for line in code_run_by(source)]


def code_run_by(source: Source) -> list[str]:
    """Return the pickles and the code that one source runs."""
    found = []
    for name in sorted(source.imports):
        if (source.module, name) in ADMITS_BY_NAME:
            continue
        if name.split(".")[0] in PICKLING_MODULES or name in ("torch.save", "torch.load"):
            found.append(f"{source.module} imports {name}")
        if name.split(".")[-1] in PICKLING_CALLS:
            found.append(f"{source.module} imports {name}, which pickles")
    for node in source.nodes:
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="save" | "load" as name):
                listed = MEASURED_AS_A_PEER | WRITTEN_FOR_OTHERS | ADMITS_BY_NAME
                if (source.module, f"torch.{name}") in listed:
                    continue
                found.append(f"{source.module}:{node.lineno} uses torch.{node.attr}")
            case ast.Attribute(value=ast.Name(id="pickle"), attr="load" | "loads" | "Unpickler" as name):
                if (source.module, f"pickle.{name}") in ADMITS_BY_NAME:
                    continue
                found.append(f"{source.module}:{node.lineno} uses pickle.{name}")
            case ast.Attribute(attr=name) if name in PICKLING_CALLS:
                found.append(f"{source.module}:{node.lineno} uses {name}, which pickles")
            case ast.Call(func=ast.Name(id=name)) if name in CODE_RUNNERS:
                found.append(f"{source.module}:{node.lineno} calls {name}")
            case ast.keyword(arg="allow_pickle"):
                found.append(f"{source.module}:{node.lineno} sets allow_pickle")
    return found


def submodules_are_imported(sources: Sequence[Source]) -> list[str]:
    """No `np.linalg`: numpy imports it at the first use, which recurses while another thread imports it."""
    return [
        f"{source.module}:{node.lineno} uses np.{node.attr} and does not import numpy.{node.attr}"
        for source in sources
        for node in source.nodes
        if isinstance(node, ast.Attribute)
        if isinstance(node.value, ast.Name) and node.value.id in ("np", "numpy")
        if node.attr in numpy.__numpy_submodules__
    ]


def narrow_handlers(sources: Sequence[Source]) -> list[str]:
    """What is caught is named; a broad handler is one that hands on what it catches, and is listed here."""
    found = []
    for source in sources:
        for node in source.nodes:
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {"everything"}
            for name in sorted(names & {"everything", "Exception", "BaseException"}):
                if source.module not in HANDED_ON.get(name, "").split():
                    found.append(f"{source.module}:{node.lineno} catches {name}")
    return found


def questions_about_families(sources: Sequence[Source]) -> list[str]:
    """No module asks which family a model is: its spec says what differs, and a new family is no other one."""
    found = []
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.Compare) and not is_or_in(source.module, "scripts"):
                sides = [side for side in (node.left, *node.comparators) if isinstance(side, ast.Attribute)]
                if any(isinstance(side.value, ast.Name) and side.value.id == "Family" for side in sides):
                    found.append(f"{source.module}:{node.lineno} asks which family a model is")
    return found


def unique_classes(sources: Sequence[Source]) -> list[str]:
    """The name of a public class means one thing."""
    homes: dict[str, list[str]] = {}
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(source.module)
    return [f"{name} is a class of {' and of '.join(where)}" for name, where in homes.items() if len(where) > 1]


def short_test_names(sources: Sequence[Source]) -> list[str]:
    """The name of a test fits a line of a report."""
    return [
        f"{source.module}.{function.name} has {len(function.name)} letters"
        for source in sources
        for function in source.functions
        if function.name.startswith("test_") and len(function.name) > MAX_TEST_NAME
    ]


def public_seams(sources: Sequence[Source]) -> list[str]:
    """No test replaces a private name of the command or its loop."""
    found = []
    for source in sources:
        for node in source.nodes:
            match node:
                case ast.Assign(targets=[ast.Attribute() as target]):
                    name = ast.unparse(target)
                case (
                    ast.Call(func=ast.Attribute(attr="setattr"), args=[owner, ast.Constant(value=str(attr)), *_])
                    | ast.Call(func=ast.Name(), args=[ast.Attribute() as owner, ast.Constant(value=str(attr)), *_])
                ):
                    name = f"{ast.unparse(owner)}.{attr}"
                case _:
                    continue
            if re.search(r"(?:^|\.)(?:loop|step|__main__|build|restore|evaluate|data\.loader|BatchLoader)\._", name):
                found.append(f"{source.module} replaces {name}")
    return found


def plain_docstrings(sources: Sequence[Source]) -> list[str]:
    """Docstrings name their subject: few words stand for it, and none says what is told."""
    texts = {source.module: docstrings_of(source) for source in sources}
    words = {module: re.findall(r"[\w'-]+", re.sub(r"`[^`]*`", "", text.lower())) for module, text in texts.items()}
    found = [f"{module} says `told` in a docstring" for module, said in words.items() if "told" in said]
    total = sum(len(said) for said in words.values())
    for word, most in MAX_PER_1000.items():
        counts = {module: said.count(word) for module, said in words.items()}
        if sum(counts.values()) * 1000 > most * total:
            places = sorted(counts, key=counts.__getitem__, reverse=True)[:5]
            rate = 1000 * sum(counts.values()) / total
            found.append(f"docstrings say `{word}` {rate:.1f} times per 1,000 words, most in {places}")
    return found


def nouns(sources: Sequence[Source]) -> list[str]:
    """Local names and parameters are nouns: few of a package are participles or pronouns."""
    totals, vague = Counter[str](), defaultdict[str, dict[str, list[str]]](dict)
    for source in sources:
        package = source.module.partition(".")[0]
        allowed = {"self", "cls", "_"} | NOUNS_BY_MODULE.get(source.module, set())
        for names in local_names(source):
            totals[package] += len(names - allowed)
            if members := sorted((names - allowed) & VAGUE_NAMES):
                vague[package].setdefault(source.module, []).extend(members)
    complaints = []
    for package, by_module in vague.items():
        count = sum(map(len, by_module.values()))
        if count * 1000 > MAX_VAGUE_PER_1000.get(package, 0) * totals[package]:
            places = {module: by_module[module] for module in sorted(by_module, key=lambda m: -len(by_module[m]))[:5]}
            complaints.append(f"{count} of {totals[package]} local names of {package} are no nouns; most in {places}")
    return complaints


def local_names(source: Source) -> list[set[str]]:
    """Return the names that each function assigns, and those of its arguments."""
    names_by_function = []
    for function in source.functions:
        names = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        names_by_function.append(
            names | {argument.arg for argument in (*function.args.args, *function.args.kwonlyargs)}
        )
    return names_by_function


def docstrings_of(source: Source) -> str:
    """Return all docstrings of a source, one after another."""
    holders = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return "\n".join(ast.get_docstring(node) or "" for node in source.nodes if isinstance(node, holders))


def keys_of(section: type, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of a section of the configuration and of its members."""
    for name, kind in get_type_hints(section).items():
        yield f"{prefix}{name}"
        if is_dataclass(kind) and isinstance(kind, type):
            yield from keys_of(kind, f"{prefix}{name}.")


def messages_of_the_library(sources: Sequence[Source]) -> list[str]:
    """The checkpoint library advises in its own terms: its callers have no keys of a configuration."""
    keys = sorted((key for key in keys_of(Config) if "." in key), key=len, reverse=True)
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, keys))})(?![\w(])")
    found = []
    for source in sources:
        if not is_or_in(source.module, LIBRARY):
            continue
        explained = {id(node.value) for node in source.nodes if isinstance(node, ast.Expr)}
        for node in source.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explained:
                found += [f"{source.module}:{node.lineno} says {key}" for key in pattern.findall(node.value)]
    return found


def clean_text(sources: Sequence[Source]) -> list[str]:
    """No path of somebody's machine and no note to come back to."""
    patterns = {
        "a path of a machine": r"(?<![\w.}*/-])/(?:root|work|home|Users)/",
        "a note": r"\b(?:TO" + r"DO|FIX" + r"ME|XX" + r"X)\b",
    }
    found = []
    for source in sources:
        for number, line in enumerate(source.text.splitlines(), start=1):
            found += [f"{source.module}:{number} holds {what}" for what, p in patterns.items() if re.search(p, line)]
    return found


PRODUCT = read_sources("models", "reprise", "trainer", "scripts")
TESTS = read_sources("tests")
RULES: tuple[Rule, ...] = (
    layers,
    library_layers,
    front,
    private_torch,
    private_members,
    no_cycles,
    foreign_imports,
    stores_are_handed_down,
    paths_are_touched_by_stores,
    failures_are_no_answers,
    sizes,
    docstrings,
    nothing_runs_code,
    submodules_are_imported,
    narrow_handlers,
    questions_about_families,
    unique_classes,
    plain_docstrings,
    nouns,
    messages_of_the_library,
    clean_text,
)


# The same for the tests.
RULES_OF_TESTS: tuple[Rule, ...] = (front, short_test_names, public_seams)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_keeps_the_rule(rule: Rule) -> None:
    assert len(PRODUCT) > 40
    assert rule(PRODUCT) == []


@pytest.mark.parametrize("rule", RULES_OF_TESTS, ids=lambda rule: rule.__name__)
def test_the_tests_keep_the_rule(rule: Rule) -> None:
    assert len(TESTS) > 100
    assert rule(TESTS) == []


def test_tests_hold_no_path_of_a_machine() -> None:
    examples = {"tests.test_architecture", "tests.unit.data.test_corpus"}  # hold made-up paths
    assert clean_text([source for source in TESTS if source.module not in examples]) == []


def test_documents_and_configuration_hold_no_path_of_a_machine() -> None:
    names = ["Makefile", "pyproject.toml", "constraints.txt", ".gitignore", ".pre-commit-config.yaml", ".ci/run"]
    names += [".github/workflows/ci.yml", "tests/README.md"]
    paths = (
        [ROOT / name for name in names]
        + sorted(ROOT.glob("*.md"))
        + sorted((ROOT / "docs").rglob("*.md"))
        + sorted(path for path in (ROOT / "examples").iterdir() if path.is_file())
        + sorted(ROOT.glob("configs/**/*.yaml"))
    )
    assert len(paths) >= 30
    assert clean_text([Source(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in paths]) == []


_DOC = '"""A module."""\n'

# A rule, a module, lines that break it, and a word of each complaint.
BROKEN: list[tuple[Rule, str, str, str]] = [
    (layers, "reprise.errors", "import trainer.training.loop", "trainer.training.loop"),
    (layers, "trainer.brand_new", "", "layer"),
    (
        library_layers,
        "reprise.saving.plan",
        "from reprise.loading.reader import open_checkpoint",
        "reprise.loading.reader",
    ),
    (private_torch, "trainer.run.build", "from torch._utils import x", "reprise.torch_private"),
    (private_members, "trainer.run.build", "import torch\nx = torch._new_name", "_new_name"),
    (front, "trainer.run.build", "from reprise.saving.policy import SavePolicy", "reprise.saving.policy"),
    (front, "tests.resume.test_x", "def f() -> None:\n    import reprise.saving.policy", "reprise.saving.policy"),
    (
        foreign_imports,
        "models.layers",
        "import numpy as np\nfrom reprise.errors import TrainerError",
        "numpy reprise.errors",
    ),
    (foreign_imports, "trainer.data.text", "def f() -> None:\n    import hydra", "hydra"),
    (
        foreign_imports,
        "trainer.run.build",
        "from omegaconf import OmegaConf\nfrom . import build",
        "omegaconf relative",
    ),
    (
        stores_are_handed_down,
        "reprise.loading.choose",
        "files = Files()\nfrom reprise.storage import FILE_SYSTEM",
        "makes chooses",
    ),
    (
        paths_are_touched_by_stores,
        "reprise.saving.plan",
        "open('x')\nos.stat(path)\n(a / b).read_bytes()",
        "open os.stat read_bytes",
    ),
    (
        failures_are_no_answers,
        "trainer.start.base",
        "(a / b).is_dir()\nos.path.isdir(a)\nlist(a.glob('*'))",
        "is_dir os.path.isdir a.glob",
    ),
    (sizes, "trainer.x", "def f() -> None:\n" + "    x = 1\n" * MAX_MODULE_LINES, "601 x.f"),
    (
        docstrings,
        "trainer.x",
        "class A: ...\ndef f() -> None: ...\n"
        "class B:\n    '''B.'''\n    def g(self) -> int:\n        x = 1\n        return x",
        "x.A x.f B.g",
    ),
    (
        nothing_runs_code,
        "trainer.x",
        "import pickle\nfrom marshal import loads\nfrom torch import load\ntorch.save({}, 'x')\neval('1')\nexec('1')\n"
        "dist.broadcast_object_list([])\nfrom torch.distributed import all_gather_object\nnp.load(x, allow_pickle=1)",
        "pickle marshal torch.load torch.save eval exec broadcast_object_list all_gather_object allow_pickle",
    ),
    (nothing_runs_code, "scripts.bench.ways", "import pickle", "pickle"),
    (nothing_runs_code, "trainer.interop.torch_file", "import pickle\npickle.load('x')", "pickle.load"),
    (submodules_are_imported, "trainer.x", "x = np.linalg.norm(y)", "numpy.linalg"),
    (
        narrow_handlers,
        "trainer.x",
        "try:\n    f()\nexcept (OSError, BaseException):\n    pass\nexcept:\n    pass",
        "BaseException everything",
    ),
    (questions_about_families, "models.build", "x = 1 if c.family is Family.gpt2 else 2", "family"),
    (unique_classes, "trainer.x", "class BatchLoader: ...", "BatchLoader"),
    (short_test_names, "tests.test_x", f"def test_{'x' * 56}() -> None: ...", "61"),
    (public_seams, "tests.test_x", "trainer.training.loop._save = f", "loop._save"),
    (public_seams, "tests.test_x", "monkeypatch.setattr(trainer.training.step, '_finish', f)", "step._finish"),
    (plain_docstrings, "trainer.x", "def f() -> None:\n    'What that one told. '", "what that one told"),
    (nouns, "models.x", "def f(known: int) -> None: ...", "models"),
    (
        messages_of_the_library,
        "reprise.api",
        "fix = f'Set {x} or checkpoint.load, run.name=x.'",
        "checkpoint.load run.name",
    ),
    (clean_text, "trainer.x", "PATH = '/ho" + "me/me/data'  # TO" + "DO: two", "path note"),
]


@pytest.mark.parametrize(
    ("rule", "module", "text", "words"), BROKEN, ids=[f"{rule.__name__}-{module}" for rule, module, *_ in BROKEN]
)
def test_a_source_that_breaks_the_rule_is_named(rule: Rule, module: str, text: str, words: str) -> None:
    source = Source(module, f"{_DOC}{text}\n")
    others = [other for other in PRODUCT if other.module in source.imports or rule is unique_classes]
    complaints = " ".join(rule([*others, source]))
    assert [word for word in words.split() if word not in complaints] == []
    assert rule([*others, Source("trainer.data.order", _DOC)]) == []


def test_a_cycle_of_imports_is_named() -> None:
    a = Source("trainer.a", "from trainer import b\n")
    b = Source("trainer.b", "def f() -> None:\n    from trainer.c import x\n")
    c = Source("trainer.c", "import trainer.a\n")
    assert len(no_cycles([a, b, c])) == 3
    assert no_cycles([a, b]) == []


def required(requirement: str) -> tuple[str, str]:
    """Return the names of a requirement and of its module."""
    name = re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]
    return name, IMPORT_NAMES.get(name, name)


def test_every_import_is_a_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = set(project["dependencies"]).union(
        *(needs for extra, needs in project["optional-dependencies"].items() if extra not in OWN_EXTRAS)
    )
    modules = {required(requirement)[1] for requirement in requirements}
    sources = [source for source in PRODUCT if not is_or_in(source.module, "scripts")]
    imported = {name.split(".")[0] for source in sources for name in source.imports}
    # Two trackers need requests, and install it.
    assert imported - modules - set(sys.stdlib_module_names) - {"requests", "reprise", "trainer", "models"} == set()


def unused_dependencies(requirements: Sequence[str], sources: Sequence[Source], tools: str) -> list[str]:
    """Return the requirements that no source imports and that are no word of `tools`."""
    imported = {name for source in sources for name in source.imports}
    found = []
    for requirement in requirements:
        name, module = required(requirement)
        if not any(is_or_in(i, module) for i in imported) and not re.search(rf"\b{re.escape(name)}\b", tools):
            found.append(name)
    return found


def test_every_dependency_is_used() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert unused_dependencies(project["dependencies"], PRODUCT, "") == []
    assert unused_dependencies([*extras["plot"], *extras["text"]], PRODUCT, "") == []
    tests = [requirement for requirement in extras["test"] if not requirement.startswith(project["name"])]
    makefile = (ROOT / "Makefile").read_text()
    assert set(unused_dependencies([*tests, *extras["interop"]], TESTS, makefile)) == set(NOT_IMPORTED)
    assert unused_dependencies(extras["check"], [], makefile) == []
