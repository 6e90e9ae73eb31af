"""The budgets of the code: sizes, broad excepts, output, module state, words."""

from __future__ import annotations

import ast
import re

import pytest

from tests.tidy.code import ALL_CODE, PRODUCT, ROOT, Function, Source, exceptions, sources, unexcused

FILE_LINES = 400
FUNCTION_LINES = 60
LONG_FUNCTION_LINES = 50
LONG_FUNCTION_SHARE = 0.03
PARAMETERS = 7
LINES_PER_BROAD_EXCEPT = 1000

RULES = ("file-length", "function-length", "parameters", "broad-except", "print", "singleton", "words")


@pytest.fixture(scope="module")
def product() -> list[Source]:
    return sources(PRODUCT)


@pytest.fixture(scope="module")
def everything() -> list[Source]:
    return sources(ALL_CODE)


def assert_none(findings: list[str]) -> None:
    """Fail with all findings, one a line."""
    assert not findings, "\n" + "\n".join(findings)


def length(function: Function) -> int:
    """Lines of a function without its docstring."""
    assert function.end_lineno is not None
    docstring = 0
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        assert first.end_lineno is not None
        docstring = first.end_lineno - first.lineno + 1
    return function.end_lineno - function.lineno + 1 - docstring


def test_files_are_short(everything: list[Source]) -> None:
    found = {one.path: f"{len(one.lines)} lines" for one in everything if len(one.lines) > FILE_LINES}
    assert_none(unexcused("file-length", found))


def test_functions_are_short(everything: list[Source]) -> None:
    found = {
        f"{one.path}::{name}": f"{length(function)} lines"
        for one in everything
        for name, function in one.functions()
        if length(function) > FUNCTION_LINES
    }
    assert_none(unexcused("function-length", found))


def test_few_functions_are_long(product: list[Source]) -> None:
    lengths = [length(function) for one in product for _, function in one.functions()]
    assert sum(lines > LONG_FUNCTION_LINES for lines in lengths) <= LONG_FUNCTION_SHARE * len(lengths)


def test_functions_take_few_parameters(everything: list[Source]) -> None:
    found = {
        f"{one.path}::{name}": f"{count} parameters"
        for one in everything
        for name, function in one.functions()
        if (count := parameters(function)) > PARAMETERS and not is_command(function)
    }
    assert_none(unexcused("parameters", found))


def parameters(function: Function) -> int:
    """Count named parameters; `self` and `cls` are none."""
    names = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def is_command(function: Function) -> bool:
    """Tell whether the function is a typer command, whose parameters are the command's options."""
    return any("command" in ast.unparse(decorator) for decorator in function.decorator_list)


def broad_handlers(source: Source) -> list[int]:
    """Line numbers of `except:`, `except Exception` and `except BaseException` that do not re-raise."""
    return [
        node.lineno
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type) and not reraises(node)
    ]


def is_broad(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(one is None or ast.unparse(one) in ("Exception", "BaseException") for one in kinds)


def reraises(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_broad_excepts_are_few_and_say_why(product: list[Source]) -> None:
    places = [(one, line) for one in product for line in broad_handlers(one)]
    silent = {
        f"{one.path}:{line}": "a broad except needs its reason on the line or in a comment above it"
        for one, line in places
        if not re.search(r"#( noqa: BLE001)?\W+\w+", one.lines[line - 1])
        and not one.lines[line - 2].lstrip().startswith("#")
    }
    assert_none(unexcused("broad-except", silent))
    total = sum(len(one.lines) for one in product)
    assert len(places) <= max(1, total // LINES_PER_BROAD_EXCEPT), [f"{one.path}:{line}" for one, line in places]


def test_only_the_command_line_prints(product: list[Source]) -> None:
    found = {
        one.path: "print() outside the command line"
        for one in product
        if not one.path.startswith("clients/python/shoal/cli/")
        for node in ast.walk(one.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    }
    assert_none(unexcused("print", found))


IMMUTABLE_CALLS = {
    *("frozenset", "tuple", "MappingProxyType", "TypeVar", "ParamSpec", "NewType", "namedtuple", "object"),
    *("re.compile", "struct.Struct", "Path", "Span", "typer.Option", "typer.Argument", "logging.getLogger"),
    *("get_logger", "structlog.get_logger", "timedelta", "ContextVar", "TypeAdapter", "typer.Typer", "MetaData"),
    *("Table", "sa.Table"),
}


def is_state(value: ast.expr | None) -> bool:
    """Tell whether a module-level value is an object that lives and changes with the process.

    Containers written out as literals are taken as tables; names in lower case with a call on the right are
    what makes a singleton.
    """
    return (
        isinstance(value, ast.Call)
        and ast.unparse(value.func).rpartition("]")[2] not in IMMUTABLE_CALLS
        and ast.unparse(value.func).split("[")[0] not in IMMUTABLE_CALLS
    )


def test_modules_hold_no_singletons(product: list[Source]) -> None:
    found: dict[str, str] = {}
    for one in product:
        for node in one.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_state(node.value):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                name = ast.unparse(target)
                if not name.lstrip("_").isupper():
                    found[f"{one.path}::{name}"] = "module-level object; build it where the process is put together"
    found |= {
        f"{one.path}::{name}": "changes a module's variable"
        for one in product
        for name, function in one.functions()
        if any(isinstance(node, ast.Global) for node in ast.walk(function))
    }
    assert_none(unexcused("singleton", found))


def test_every_module_says_what_it_is(product: list[Source]) -> None:
    found = [
        one.path for one in product if one.text.strip() and len(ast.get_docstring(one.tree) or "") < len("Errors.")
    ]
    assert_none(found)


def test_no_work_is_left_in_comments(everything: list[Source]) -> None:
    marks = re.compile("#.*\\b(TO" + "DO|FIX" + "ME|XX" + "X|HA" + "CK)\\b")
    found = [
        f"{one.path}:{number}" for one in everything for number, line in enumerate(one.lines, 1) if marks.search(line)
    ]
    assert_none(found)


WORDS = (
    *("petals", "claude", "anthropic", "copilot", "chatgpt", "(coding|ai) (agent|assistant)", "sub-?agents?"),
    *("/work/", "shoalvenv", "/opt/wheels", r"scenarios\.md", r"infra\.md", r"style\.md", "workplace"),
)


def test_no_words_of_elsewhere() -> None:
    """Code and documents speak of the product, not of the place or manner in which they were written."""
    pattern = re.compile("|".join(WORDS), re.IGNORECASE)
    suffixes = {".py", ".md", ".toml", ".proto", ".yaml", ".yml", ".txt", ".sh", ""}
    skipped = {"tests/tidy/test_budgets.py", "LICENSE"}
    found: dict[str, str] = {}
    for path in tracked_files():
        if path in skipped or not any(path.endswith(suffix) for suffix in suffixes if suffix):
            continue
        for number, line in enumerate((ROOT / path).read_text().splitlines(), 1):
            if match := pattern.search(line):
                found[path] = f"line {number} says {match[0]!r}"
    assert_none(unexcused("words", found))


def tracked_files() -> list[str]:
    """Files of the repository, without what tools leave there."""
    hidden = re.compile(r"(^|/)(\.(?!ci/)[^/]+|__pycache__|build|dist|[^/]*\.egg-info)(/|$)")
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*") if path.is_file()]
    return sorted(name for name in names if not hidden.search(name))


def test_exceptions_have_known_rules_and_reasons() -> None:
    assert [entry for entry in exceptions() if entry.rule not in RULES or len(entry.reason.split()) < 3] == []
