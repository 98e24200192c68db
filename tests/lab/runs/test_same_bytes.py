"""Two equal runs write the same ``model.safetensors``, byte for byte."""

from __future__ import annotations

from safetensors import safe_open


def test_the_model_of_equal_runs_is_equal_byte_for_byte(quick_run) -> None:
    (_, first), (_, second) = quick_run(strategy="fedbn"), quick_run(strategy="fedbn")
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    with safe_open(first / "model.safetensors", "np") as file:
        assert file.metadata()["format"] == "pt"
