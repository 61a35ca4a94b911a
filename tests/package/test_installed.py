"""The lines that install more of the package: what pip wrote down about where it had it from decides."""

import json
from pathlib import Path

import pytest

from jaxshard_magic import packages
from jaxshard_magic.packages import install_command, upgrade_command


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Puts the package's metadata first on the path, as pip leaves it for an origin; None for an index."""

    def put(origin: dict | None) -> None:
        info = tmp_path / "site" / "jaxshard_magic-9.9.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: jaxshard_magic\nVersion: 9.9\n")
        if origin is not None:
            (info / "direct_url.json").write_text(json.dumps(origin))
        monkeypatch.syspath_prepend(info.parent)

    return put


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "my checkout"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    return folder


def test_an_editable_checkout_is_installed_again_by_its_folder(installed, checkout):
    installed({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    assert install_command("tpu", "jax==0.10.2") == f"pip install -e '{checkout}[tpu]' \"jax==0.10.2\""
    assert upgrade_command() == f"git -C '{checkout}' pull"


def test_in_the_checkout_itself_a_dot_names_it(installed, checkout, monkeypatch):
    installed({"url": checkout.as_uri(), "dir_info": {"editable": True}})
    monkeypatch.chdir(checkout)
    assert install_command("tpu") == "pip install -e '.[tpu]'"


def test_a_copy_of_a_checkout_is_installed_anew_to_be_newer(installed, checkout):
    installed({"url": checkout.as_uri(), "dir_info": {}})
    assert install_command("cuda-aot") == f"pip install '{checkout}[cuda-aot]'"
    assert upgrade_command() == f"git -C '{checkout}' pull && pip install '{checkout}'"


@pytest.mark.parametrize(
    ("origin", "extra", "newer"),
    [
        (None, '"jaxshard_magic[tpu]"', "jaxshard_magic"),
        (
            {"url": "https://git.example/it", "vcs_info": {"vcs": "git", "commit_id": "1f"}},
            '"jaxshard_magic[tpu] @ git+https://git.example/it"',
            '"jaxshard_magic @ git+https://git.example/it"',
        ),
        (
            {"url": "file:///wheels/it-9.9.whl", "archive_info": {}},
            '"jaxshard_magic[tpu] @ file:///wheels/it-9.9.whl"',
            '"jaxshard_magic @ file:///wheels/it-9.9.whl"',
        ),
        ({"url": "file:///gone", "dir_info": {"editable": True}}, '"jaxshard_magic[tpu]"', "jaxshard_magic"),
    ],
    ids=["an index", "a repository", "a wheel", "a checkout that is gone"],
)
def test_elsewhere_the_address_or_the_name_is_told(installed, origin, extra, newer):
    installed(origin)
    assert install_command("tpu") == f"pip install {extra}"
    assert upgrade_command() == f"pip install --upgrade {newer}"


def test_a_package_that_nobody_installed_is_told_by_its_name(monkeypatch):
    monkeypatch.setattr(packages, "OURS", "a-name-that-nothing-has")
    assert install_command("tpu") == 'pip install "a-name-that-nothing-has[tpu]"'
