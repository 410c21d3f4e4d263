"""Templates that were compiled once are kept with the bytecode of the modules."""

import os
import subprocess
import sys

import pytest
from jinja2 import DictLoader, Environment

from treeckpt_dashboard.pages import render


@pytest.fixture
def kept(tmp_path):
    """Opens a template as another process would, and says whether it was compiled; and the directory of the files."""
    directory = tmp_path / "bytecode"
    directory.mkdir()

    def rendered(source):
        compiled = []

        class Watched(Environment):
            def compile(self, *arguments, **options):
                compiled.append(source)
                return super().compile(*arguments, **options)

        environment = Watched(loader=DictLoader({"page": source}), bytecode_cache=render.CompiledTemplates(directory))
        return environment.get_template("page").render(n=3), bool(compiled)

    return rendered, directory


def test_a_template_is_compiled_once_and_anew_when_it_changes(kept):
    rendered, _ = kept
    assert rendered("n is {{ n }}") == ("n is 3", True)
    assert rendered("n is {{ n }}") == ("n is 3", False)
    assert rendered("n = {{ n }}") == ("n = 3", True)


def test_another_compiler_compiles_anew(kept, tmp_path, monkeypatch):
    rendered, _ = kept
    rendered("n is {{ n }}")
    (tmp_path / "compiler.py").write_text("# a newer one")
    monkeypatch.setattr(render.compiler, "__file__", str(tmp_path / "compiler.py"))
    assert rendered("n is {{ n }}") == ("n is 3", True)


def test_damage_of_a_file_and_a_missing_directory_are_no_errors(kept):
    rendered, directory = kept
    rendered("n is {{ n }}")
    [path] = directory.iterdir()
    path.write_bytes(path.read_bytes()[:40])
    assert rendered("n is {{ n }}") == ("n is 3", True)
    path.unlink()
    directory.rmdir()
    assert rendered("n is {{ n }}") == ("n is 3", True)


def test_compiled_pages_lie_beside_the_bytecode_of_the_module(tmp_path):
    code = "from treeckpt_dashboard.pages.render import templates; templates().get_template('error.html')"
    for writes, found in (("1", False), ("", True)):
        environment = os.environ | {"PYTHONPYCACHEPREFIX": str(tmp_path), "PYTHONDONTWRITEBYTECODE": writes}
        subprocess.run([sys.executable, "-c", code], env=environment, check=True)
        assert bool([*tmp_path.rglob("__jinja2_*.cache")]) is found
