"""The code blocks of the two READMEs: what must agree, and what may differ."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

ENGLISH = """# Title

Install it:

```bash
pip install x
```

Use it:

```python
import x

x.f()
```
"""
CHINESE = ENGLISH.replace("Title", "标题").replace("Install it", "安装").replace("Use it", "使用")


def test_text_may_differ_and_code_may_not(tool: Callable[[str], ModuleType]) -> None:
    compare = tool("check_readme").compare
    assert compare(ENGLISH, CHINESE) == []
    assert compare(ENGLISH, CHINESE.replace("\n", "\r\n")) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("x.f()", "x.g()", "code block 2 ('import x') differs"),
        ("```bash", "```sh", "code block 1 ('pip install x') differs"),
        ("import x\n\nx.f()", "import x\nx.f()", "code block 2"),
        ("```bash\npip install x\n```\n", "", "has 2 code blocks, README.zh-CN.md has 1"),
    ],
)
def test_a_difference_is_found(tool: Callable[[str], ModuleType], old: str, new: str, problem: str) -> None:
    assert old in CHINESE
    found = tool("check_readme").compare(ENGLISH, CHINESE.replace(old, new))
    assert any(problem in text for text in found), found


def test_readmes_without_code_do_not_pass(tool: Callable[[str], ModuleType]) -> None:
    assert tool("check_readme").compare("# Title", "# Title") == ["README.md has no code block"]


def test_fences_inside_longer_fences(tool: Callable[[str], ModuleType]) -> None:
    blocks = tool("check_readme").code_blocks("````md\n```py\nx\n```\n````\n~~~\ny\n~~~\n")
    assert blocks == [("md", "```py\nx\n```"), ("", "y")]
