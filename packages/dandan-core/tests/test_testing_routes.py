"""The checks of routes: each passes for a library that answers as it must, and fails for one that does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dandan_ops_core.backend import BackendUnavailableError
from dandan_ops_core.testing import routes

# As routes.h is written: one function of each name, a brace in the first column at its end.
ROUTES = """
inline constexpr const char* kBackendNames[] = {"auto", "torch", "cuda", "row"};

inline const char* obstacle(const Call& call) {
  if (call.odd) return "rows are odd";
  return call.wide ? "rows are \\"wide\\"" : nullptr;
}

inline Route select(const Call& call) {
  route.reason = "the fastest of all";
  route.kernel = "torch";
}

inline const char* other(const Call& call) {
  return "nobody asked for this";
}
"""


class Compiled:
    """What the checks read of an OperatorLibrary; `rows` are those in force, `on` is the switch."""

    def __init__(self, sass: str = "", ptx: str = "") -> None:
        self.described = {"sass": sass, "ptx": ptx}
        self.rows = ""
        self.on = 0

    def describe(self) -> dict[str, Any]:
        return self.described

    def op(self, name: str) -> Callable[..., Any]:
        return {"set_profile": self.set_profile, "set_dependent_launch": self.set_dependent_launch}[name]

    def set_profile(self, raw: torch.Tensor) -> None:
        if raw.dtype != torch.uint8 or raw.dim() != 1 or not raw.is_contiguous():
            raise RuntimeError("TypeError: a contiguous 1-d uint8 tensor on the CPU is needed\nand a trace")
        text = bytes(raw.tolist()).decode()
        for line in text.splitlines():
            if line.count(";") != 1:
                raise RuntimeError(f'ValueError: profile row "{line}" is not op;kernel\nand a trace')
        self.rows = text

    def set_dependent_launch(self, value: int) -> int:
        before, self.on = self.on, int(value != 0)
        return before


def library(**described: str) -> Any:
    return Compiled(**described)


# -------------------------------------------------------------------------------------------------------- architectures


@pytest.mark.parametrize(
    ("sass", "ptx", "codes"),
    [
        ("90a", "", {80: 0, 90: 90, 100: 0}),  # architecture-specific code runs nowhere else
        ("80,90a", "", {75: 0, 80: 80, 86: 80, 89: 80, 90: 90, 100: 0}),
        ("80,86", "", {80: 80, 86: 86, 89: 86, 90: 0}),
        ("90a,100f", "80", {75: 0, 80: 80, 90: 90, 100: 100, 120: 80}),
        ("", "80,90", {75: 0, 89: 80, 90: 90, 120: 90}),
        ("80", "80", {86: 80, 90: 80}),
    ],
)
def test_the_code_that_a_device_runs(sass: str, ptx: str, codes: dict[int, int]) -> None:
    compiled = library(sass=sass, ptx=ptx)
    assert {arch: routes.code_for(compiled, arch) for arch in codes} == codes


def test_home_is_an_h200_where_there_is_code_for_it() -> None:
    assert routes.home(library(sass="80,90a")) == 90
    assert routes.home(library(sass="80")) == 80
    assert routes.home(library(sass="120")) == 120


def test_what_is_built() -> None:
    compiled = library(sass="80,90a", ptx="90")
    assert routes.code_targets(compiled) == (["80", "90a"], [90])
    assert [name for name in ("80", "90", "90a", "9") if routes.built(compiled, name)] == ["80", "90a"]


def test_a_test_is_skipped_without_the_code_that_it_needs() -> None:
    routes.require_code(library(sass="80,90a"), "90a")
    with pytest.raises(pytest.skip.Exception, match="the library was built without code for sm_90a"):
        routes.require_code(library(sass="80,90"), "90a")


NO_CODE = "this build has no code for the device's architecture"


@pytest.mark.parametrize(
    ("auto", "why", "found"),
    [
        ({"kernel": "torch", "fallback_reason": NO_CODE}, NO_CODE, None),
        ({"kernel": "row", "fallback_reason": None}, NO_CODE, "there is no code for the device: "),
        ({"kernel": "torch", "fallback_reason": "never measured"}, NO_CODE, "there is no code for the device: "),
        ({"kernel": "torch", "fallback_reason": NO_CODE}, "rows are odd", "the refusal says: "),
        ({"kernel": "torch", "fallback_reason": NO_CODE}, None, "nothing was refused: "),
    ],
)
def test_a_device_without_code(auto: dict[str, Any], why: str | None, found: str | None) -> None:
    def question(backend: str) -> dict[str, Any]:
        if backend == "auto" or why is None:
            return auto
        raise BackendUnavailableError(routes.cannot("op", backend, why))

    with contextlib.nullcontext() if found is None else pytest.raises(AssertionError, match=f"^{found}"):
        routes.check_without_code(question, "op", ("cuda", "row"))


# -------------------------------------------------------------------------------------------------------------- answers


def test_a_sheet_has_a_size_and_no_memory() -> None:
    sheet = routes.sheet(1 << 20, 1 << 20)
    assert (sheet.device.type, sheet.dtype, sheet.is_contiguous()) == ("meta", torch.float16, True)


def test_keys_of_an_answer() -> None:
    raw = torch.frombuffer(bytearray(b'{"kernel": "row", "us": 1}'), dtype=torch.uint8)
    assert routes.keys_of(raw) == {"kernel", "us"}
    with pytest.raises(AssertionError, match="an answer is bytes, not torch.int32"):
        routes.keys_of(raw.to(torch.int32))


def refuse(text: str) -> Any:
    raise BackendUnavailableError(text)


def test_explanations_are_reasons_or_what_a_refusal_says() -> None:
    answer = {"kernel": "row", "reason": "the fastest of all", "fallback_reason": None}
    assert routes.explanations(lambda **_: answer, backend="row") == {"the fastest of all", None}
    for text in (routes.cannot("op", "row", "rows are odd"), routes.cannot("op", "row", "rows are odd", "tile")):
        assert routes.explanations(refuse, text) == {"rows are odd"}
    assert text == 'op: backend "row" cannot run: rows are odd; "auto" and "torch" can, and so can "tile"'
    with pytest.raises(ValueError, match="^invalid"):
        routes.explanations(int, "x", base=10)


def test_configurations_that_a_profile_can_name() -> None:
    compiled = library()

    def check(*table: tuple[str, int], **options: Any) -> None:
        compiled.described["configs"] = {"row": [{"name": name, "head_dim": size} for name, size in table]}
        routes.check_configurations(compiled, ["row"], **options)

    check(("8x8", 64), ("8x8-s+1_", 64))
    check(("8x8", 64), ("8x8", 128), alike="head_dim")
    for wrong, options, text in (
        ([], {}, "row has no configuration"),
        ([("8.8", 64)], {}, "cannot hold '8.8'"),
        ([("", 64)], {}, "cannot hold ''"),
        ([("8x8", 64), ("8x8", 128)], {}, "configurations of one name"),
        ([("8x8", 64), ("8x8", 64)], {"alike": "head_dim"}, "configurations of one name"),
    ):
        with pytest.raises(AssertionError, match=text):
            check(*wrong, **options)
    with pytest.raises(AssertionError, match=r"configurations of \['row'\], the kernels are \['row', 'tile'\]"):
        routes.check_configurations(compiled, ["row", "tile"])


# ------------------------------------------------------------------------------------------------------------- profiles


def test_rows_are_taken_back_whatever_happens() -> None:
    compiled = library()
    with routes.profile_rows(compiled) as put:
        put("op;row\n")
        assert compiled.rows == "op;row\n"
        put("op;tile\n")
        assert compiled.rows == "op;tile\n"
    assert compiled.rows == ""
    with contextlib.suppress(KeyError), routes.profile_rows(compiled) as put:
        put("op;row\n")
        raise KeyError
    assert compiled.rows == ""


def test_a_refused_row() -> None:
    compiled = library()
    with routes.profile_rows(compiled) as put:
        routes.check_row_refused(put, "op;row", "op", "op;kernel")
        assert compiled.rows == "op;row"
        with pytest.raises(AssertionError, match='^row "op;tile" was taken$'):
            routes.check_row_refused(put, "op;row", "op;tile", "op;kernel")
        with pytest.raises(AssertionError, match='^the refusal of row "op" says: ValueError'):
            routes.check_row_refused(put, "op;row", "op", "op;dtype;kernel")


@pytest.mark.parametrize("kind", routes.NO_ROWS)
def test_tensors_that_hold_no_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = library()
    routes.check_not_rows(compiled, routes.NO_ROWS[kind])
    with pytest.raises(AssertionError, match=r"^a tensor of torch.uint8 \(0,\) \(1,\) was taken for rows$"):
        routes.check_not_rows(compiled, torch.empty(0, dtype=torch.uint8))
    monkeypatch.setattr(compiled, "set_profile", lambda raw: (_ for _ in ()).throw(RuntimeError("no")).__next__())
    with pytest.raises(AssertionError, match="^the refusal says: no$"):
        routes.check_not_rows(compiled, routes.NO_ROWS[kind])


def test_the_switch_of_dependent_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = library()
    for state in (0, 1):
        compiled.on = state
        routes.check_dependent_launch(compiled)
        assert compiled.on == state
    for wrong in (lambda value: 0, lambda value: 1, lambda value: value):
        monkeypatch.setattr(compiled, "set_dependent_launch", wrong)
        with pytest.raises(AssertionError, match=r"^set_dependent_launch\(\d\) returned"):
            routes.check_dependent_launch(compiled)


# ------------------------------------------------------------------------------------------------------------- routes.h


def test_the_text_of_one_function() -> None:
    text = routes.function_text(ROUTES, "select")
    assert text.startswith("inline Route select(")
    assert "the fastest" in text
    assert "nobody" not in text
    with pytest.raises(AssertionError, match="routes.h has no function missing"):
        routes.function_text(ROUTES, "missing")


def test_sentences_are_all_texts_of_several_words() -> None:
    assert routes.sentences(ROUTES, "obstacle", "select") == {"rows are odd", 'rows are "wide"', "the fastest of all"}
    assert routes.sentences(ROUTES, "select", words=1) == {"the fastest of all", "torch"}
    assert routes.sentences(ROUTES, "obstacle", "select", words=4) == {"the fastest of all"}


def test_names_of_an_array() -> None:
    assert routes.names_in(ROUTES, "kBackendNames") == ["auto", "torch", "cuda", "row"]
    with pytest.raises(AssertionError, match="routes.h has no array kOpNames"):
        routes.names_in(ROUTES, "kOpNames")
