"""Rules for the source itself, read from its syntax tree."""

import ast
import functools
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "vitlab"
FILES = [path.relative_to(SOURCE).as_posix() for path in sorted(SOURCE.rglob("*.py"))]
Rule = Callable[[ast.Call, ast.AST], bool]


@pytest.fixture(autouse=True, scope="module")
def no_collection() -> Generator[None]:
    """Half a million nodes live on; to look through them for garbage again and again takes longer than to make them."""
    gc.disable()
    yield
    gc.enable()


@functools.cache
def parsed() -> dict[str, ast.Module]:
    """Not when tests are collected, which every worker does: the source is long."""
    return {path: ast.parse((SOURCE / path).read_text()) for path in FILES}


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of names; what is not a name becomes `?`."""
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


@functools.cache  # every rule looks at all of them, and walking takes longer than judging
def nodes_of(tree: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
    """Every node in the order of the text, with the function it stands in."""
    found, left = list[tuple[ast.AST, ast.AST]](), [(tree, tree)]
    while left:
        node, scope = left.pop()
        found.append((node, scope))
        inner = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else scope
        left += [(child, inner) for child in ast.iter_child_nodes(node)][::-1]
    return found


@functools.cache
def calls_of(tree: ast.AST) -> list[tuple[ast.Call, ast.AST]]:
    return [(node, scope) for node, scope in nodes_of(tree) if isinstance(node, ast.Call)]


def offenders(rule: Rule, trees: dict[str, ast.AST]) -> list[str]:
    return [
        f"{path}:{call.lineno} {ast.unparse(call)[:80]}"
        for path, tree in trees.items()
        for call, scope in calls_of(tree)
        if rule(call, scope)
    ]


# --- who writes to disk -----------------------------------------------------------------------------------------------

PATH_METHODS = {
    *("write_text", "write_bytes", "mkdir", "rmdir", "rename", "unlink", "touch", "symlink_to", "hardlink_to", "chmod"),
    *("tofile", "to_csv", "to_parquet", "save_file", "savez", "savez_compressed", "savetxt", "export"),
}
OS_READERS = {
    "access",
    "close",
    "cpu_count",
    "environ",
    "fdopen",
    "fspath",
    "fstat",
    "fsync",
    "getpid",
    "listdir",
    "lseek",
    "path",
    "scandir",
    "stat",
    "strerror",
    "walk",
    "getppid",
    "sched_getaffinity",
    "nice",
}
TEMPORARY = {"NamedTemporaryFile", "TemporaryFile", "TemporaryDirectory", "mkdtemp", "mkstemp"}


def goes_to_memory(call: ast.Call, scope: ast.AST) -> bool:
    """Is the first argument, or `fileobj`, a buffer that was made in this very function? torch.export has it second."""
    first = 1 if dotted(call.func) == "torch.export.save" else 0
    given = [
        *call.args[first : first + 1],
        *(keyword.value for keyword in call.keywords if keyword.arg == "fileobj"),
    ]
    if not given or not isinstance(given[0], ast.Name):
        return False
    return any(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and dotted(node.value.func) in ("io.BytesIO", "io.StringIO", "StreamBuffer")
        and [dotted(target) for target in node.targets] == [given[0].id]
        for node in ast.walk(scope)
    )


def open_mode(call: ast.Call, position: int) -> str:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "mode"] + call.args[position : position + 1]
    if given and not isinstance(given[0], ast.Constant):
        return "unknown, so w"
    # A word that is not a mode is the name of a member in an archive.
    return str(given[0].value) if given and re.fullmatch(r"[rwaxbt+]+(:\w*)?", str(given[0].value)) else "r"


def writes_to_disk(call: ast.Call, scope: ast.AST) -> bool:
    name = dotted(call.func)
    first, _, last = name.rpartition(".")
    if name == "open" or last == "open":
        if name == "os.open":
            return dotted(call.args[0]) != "os.devnull" and dotted(call.args[1]) not in ("os.O_RDONLY", "_FLAGS")
        if name in ("Image.open", "gzip.open") and len(call.args) == 1:
            return False
        # `path.open(mode)`, but `open(file, mode)` and `tarfile.open(file, mode)`
        mode = open_mode(call, 1 if name in ("open", "tarfile.open") or len(call.args) > 1 else 0)
        return bool(set("wax+") & set(mode)) and not goes_to_memory(call, scope)
    if first == "os":
        return last not in OS_READERS | {"dup2", "_exit", "setpgid"}
    if last == "replace":  # text.replace takes two values and dataclasses.replace takes keywords; a path takes one
        return len(call.args) == 1 and not call.keywords
    if last in ("save", "savefig", "savez"):
        return name != "safetensors.torch.save" and not goes_to_memory(call, scope)
    if name == "export":  # the verb's own function
        return False
    if name in ("torch.export.export", "torch.onnx.export"):  # which write only where they are given a file
        return len(call.args) > 2 or any(keyword.arg == "f" for keyword in call.keywords)
    if first == "shutil":
        return last not in {"disk_usage", "which"}
    return last in PATH_METHODS | TEMPORARY


def test_nothing_but_fsio_writes_to_disk() -> None:
    assert offenders(writes_to_disk, {path: tree for path, tree in parsed().items() if path != "core/fsio.py"}) == []


PLANTED_WRITES = [
    "open('x', 'w')",
    "open('x', mode='ab')",
    "path.open('xb')",
    "path.open(mode)",
    "path.write_text('x')",
    "path.write_bytes(b'')",
    "path.mkdir(parents=True)",
    "path.rename(other)",
    "path.replace(other)",
    "os.replace(a, b)",
    "os.makedirs(a)",
    "os.open(a, os.O_WRONLY)",
    "shutil.copy(a, b)",
    "torch.save(x, path)",
    "safetensors.torch.save_file(x, path)",
    "figure.savefig(path)",
    "picture.save(path)",
    "np.savez(path, x)",
    "tempfile.mkdtemp()",
    "tarfile.open(path, 'w')",
    "tarfile.open(fileobj=file, mode='w')",
    "gzip.open(path, 'wb')",
    "torch.export.save(program, path)",
    "torch.onnx.export(model, arguments, path)",
    "torch.onnx.export(program, f=path)",
]
HARMLESS = [
    "torch.export.export(module, arguments)",
    "torch.onnx.export(program, dynamo=True)",
    "open('x')",
    "path.open('rb')",
    "tarfile.open(path, 'r:')",
    "archive.open('data.npy')",
    "text.replace('a', 'b')",
    "dataclasses.replace(spec, width=3)",
    "os.access(path, os.W_OK)",
    "os.open(os.devnull, os.O_WRONLY)",
    "shutil.disk_usage(path)",
    "safetensors.torch.save(tensors)",
    "def f():\n    buffer = io.BytesIO()\n    figure.savefig(buffer, format='svg')",
]


@pytest.mark.parametrize("code", PLANTED_WRITES)
def test_gate_sees_a_planted_write(code: str) -> None:
    assert len(offenders(writes_to_disk, {"planted.py": ast.parse(code)})) == 1


@pytest.mark.parametrize("code", HARMLESS)
def test_gate_lets_what_is_harmless_through(code: str) -> None:
    assert offenders(writes_to_disk, {"planted.py": ast.parse(code)}) == []


# --- who opens files for reading --------------------------------------------------------------------------------------

READING = "core/reading.py"  # opens regular files only: a FIFO or a device would be waited for, for ever
OTHER_READS = {  # by module: what it reads, and why that is no stranger's file
    "core/environment.py": "the source of vitlab itself",
    "core/fsio.py": "os.open of a folder, to sync it",
    "evaluation/published.py": "the tables of the package",
    "evaluation/features.py": "the list of images beside the chunks of the cache",
    "evaluation/row_store.py": "chunks of the cache, after their hashes were compared",
    "training/checkpoint.py": "checkpoints, while their hashes are compared",
    "core/memory.py": "what Linux tells under /proc and /sys",
    "serving/app.py": "the files of the page, which are the package's own",
}
LIBRARY_READERS = {"load", "memmap", "ZipFile", "safe_open", "read_table", "fromfile", "loadtxt", "genfromtxt"}
NOT_A_PATH = ("archive", "gzip", "Image", "opener", "?")  # whose `open` takes a member, a file, an address


def is_open_already(node: ast.AST, scope: ast.AST) -> bool:
    """Is it the result of a call, a name that a `with` of this function binds, or a parameter that is a file?"""
    if not isinstance(node, ast.Name):
        return isinstance(node, ast.Call)
    bound = [item.optional_vars for inner in ast.walk(scope) if isinstance(inner, ast.With) for item in inner.items]
    arguments = [arg for inner in ast.walk(scope) if isinstance(inner, ast.arguments) for arg in inner.args]
    files = [arg.arg for arg in arguments if arg.annotation and "IO" in ast.unparse(arg.annotation)]
    return node.id in {*files, *(name.id for name in bound if isinstance(name, ast.Name))}


def opens_for_reading(call: ast.Call, scope: ast.AST) -> bool:
    name = dotted(call.func)
    first, _, last = name.rpartition(".")
    given = [*call.args[:1], *(keyword.value for keyword in call.keywords if keyword.arg == "fileobj")]
    if last in ("read_text", "read_bytes") and first not in ("", "reading"):
        return "resources" not in ast.unparse(call.func)  # of the package, wherever that is installed
    if name in ("open", "os.open", "io.open"):
        return not (given and dotted(given[0]) == "os.devnull")
    if last == "open" and name != "tarfile.open":
        return first.split(".")[-1] not in NOT_A_PATH and not set("wax") & set(open_mode(call, 0))
    is_library = first.split(".")[0] in ("np", "zipfile", "safetensors", "parquet") and last in LIBRARY_READERS
    is_library = is_library or name == "safe_open"
    return (
        (name == "tarfile.open" or is_library)
        and not goes_to_memory(call, scope)
        and not (given and is_open_already(given[0], scope))
    )


def test_nothing_but_reading_opens_files_of_others() -> None:
    trees = {path: tree for path, tree in parsed().items() if path not in (READING, *OTHER_READS)}
    assert offenders(opens_for_reading, trees) == []


@pytest.mark.parametrize(
    "code",
    [
        *("open(path)", "open(path, 'rb')", "path.open()", "path.open('rb')", "(folder / name).read_text()"),
        *("path.read_bytes()", "np.load(path)", "np.memmap(path)", "zipfile.ZipFile(path)", "tarfile.open(path, 'r:')"),
        *("safe_open(path, 'pt')", "parquet.read_table(path)", "os.open(path, os.O_RDONLY)"),
    ],
)
def test_gate_sees_a_planted_read(code: str) -> None:
    assert len(offenders(opens_for_reading, {"planted.py": ast.parse(code)})) == 1


@pytest.mark.parametrize(
    "code",
    [
        *("reading.read_text(path)", "read_bytes(path)", "resources.files('x').joinpath('y').read_text()"),
        *("archive.open(info)", "np.load(io.BytesIO(data))", "path.open('xb')"),
        "def f():\n    with open_regular(path) as file:\n        np.load(file)",
        "def f(file: IO[bytes]):\n    tarfile.open(fileobj=file, mode='r:')",
    ],
)
def test_gate_lets_other_reads_through(code: str) -> None:
    assert offenders(opens_for_reading, {"planted.py": ast.parse(code)}) == []


# --- who runs code that is data ---------------------------------------------------------------------------------------

FORBIDDEN_IMPORTS = {
    *("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "subprocess", "pty", "ctypes"),
    *("timm", "transformers", "torchvision", "jax", "flax", "yaml"),
}
STARTS_WORKERS = "studies/study_run.py"  # this Python with a module of vitlab, and nvidia-smi to count GPUs
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "torch.hub.load", "os.system", "os.popen"}


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node, _ in nodes_of(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def forbidden_imports(tree: ast.AST) -> set[str]:
    return {name for name in imported(tree) if name.split(".")[0] in FORBIDDEN_IMPORTS or name.endswith(".pickle")}


def runs_data(call: ast.Call, _scope: ast.AST) -> bool:
    name = dotted(call.func)
    allows_pickle = any(
        keyword.arg == "allow_pickle" and ast.unparse(keyword.value) != "False" for keyword in call.keywords
    )
    return name in FORBIDDEN_CALLS or name.startswith(("pickle.", "yaml.", "subprocess.")) or allows_pickle


def test_no_peer_and_no_unsafe_module_is_imported() -> None:
    found = {path: forbidden_imports(tree) for path, tree in parsed().items()}
    assert {path: names for path, names in found.items() if names} == {STARTS_WORKERS: {"subprocess"}}


def test_no_data_is_ever_run() -> None:
    # One call reads torch's files. It is weights-only unless a person said otherwise on the command line.
    allowed = ("weights/archives.py", "weights_only=not trust_pickle")
    found = [place for place in offenders(runs_data, parsed()) if not all(part in place for part in allowed)]
    started = [place for place in found if place.startswith(f"{STARTS_WORKERS}:")]
    assert [place.partition(" ")[2][:35] for place in started] == [
        "subprocess.Popen(argv, env=dict(env",
        "subprocess.run(['nvidia-smi', '-L']",
    ]
    assert [place for place in found if place not in started] == []


@pytest.mark.parametrize(
    "code", ["eval('1')", "exec(x)", "torch.load(p)", "np.load(p, allow_pickle=True)", "yaml.load(f)", "os.system('x')"]
)
def test_gate_sees_planted_code(code: str) -> None:
    assert len(offenders(runs_data, {"planted.py": ast.parse(code)})) == 1


def test_gate_lets_a_refusal_of_pickles_through() -> None:
    assert offenders(runs_data, {"planted.py": ast.parse("np.load(p, allow_pickle=False)")}) == []


@pytest.mark.parametrize("code", ["import pickle", "from timm import create_model", "import torchvision.ops as ops"])
def test_gate_sees_a_planted_import(code: str) -> None:
    assert forbidden_imports(ast.parse(code))


# --- shape ------------------------------------------------------------------------------------------------------------


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node, _ in nodes_of(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def is_verb(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Name) and decorator.func.id == "verb"


def test_no_function_swallows_keywords() -> None:
    """But for what takes the options of a verb, each of which is declared and checked elsewhere: in the options class."""
    allowed = {("options/option.py", "call"), ("options/option.py", "command_of"), ("cli/options.py", "verb")}
    swallowing = {
        (path, function.name)
        for path, tree in parsed().items()
        for function in functions(tree)
        if function.args.kwarg is not None and not any(map(is_verb, function.decorator_list))
    }
    assert swallowing - allowed == set()


def test_every_argument_and_result_is_annotated() -> None:
    bare = []
    for path, function in ((path, function) for path, tree in parsed().items() for function in functions(tree)):
        given = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        bare += [
            f"{path} {function.name}({arg.arg})"
            for arg in given
            if arg.annotation is None and arg.arg not in ("self", "cls")
        ]
        bare += [f"{path} {function.name}"] if function.returns is None else []
    assert bare == []


def test_every_module_says_what_it_owns() -> None:
    assert [path for path, tree in parsed().items() if tree.body and not ast.get_docstring(tree)] == []


def test_no_file_has_a_name_that_means_anything_and_nothing() -> None:
    vague = {"util", "utils", "helper", "helpers", "common", "misc", "base", "manager", "stuff", "tools"}
    assert [path for path in SOURCE.rglob("*") if path.stem in vague] == []


def test_rooms_import_only_rooms_below_them() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(lint), "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


# --- who prints -------------------------------------------------------------------------------------------------------


def prints_as_it_is(call: ast.Call, scope: ast.AST) -> bool:
    """Text of files may hold what a terminal would follow; these places escape it."""
    return dotted(call.func) in ("print", "typer.echo", "sys.stdout.write", "sys.stderr.write", "traceback.print_exc")


def test_nothing_is_printed_but_where_control_characters_are_escaped() -> None:
    allowed = {"cli/options.py", "cli/main.py"}
    assert offenders(prints_as_it_is, {path: tree for path, tree in parsed().items() if path not in allowed}) == []


def test_tests_that_the_makefile_names_exist() -> None:
    """One that was renamed would end a target before its first test."""
    named = re.findall(r"\btests/[\w/.]+", (ROOT / "Makefile").read_text())
    assert "tests/system" in named
    assert [path for path in named if not (ROOT / path).exists()] == []
