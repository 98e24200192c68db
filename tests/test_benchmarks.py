"""The benchmarks' arithmetic is correct, and their numbers fit into the page.

They still run with this package.
"""

import pytest

from tests.support.fast import fast


def test_a_block_of_a_page_is_replaced_and_nothing_else(tmp_path) -> None:
    from measure import write_block

    page = tmp_path / "page.md"
    page.write_text("# Page\n<!-- a -->\nold\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\n")
    write_block(page, "a", "new\n")
    write_block(page, "a", "newer")
    assert (
        page.read_text()
        == "# Page\n<!-- a -->\n\nnewer\n\n<!-- /a -->\n<!-- b -->\n<!-- /b -->\n"
    )
    with pytest.raises(ValueError, match="<!-- c -->"):
        write_block(page, "c", "")


# The other settings are slower, and two of them read the same images from files.
@pytest.mark.parametrize(
    "setting",
    fast(["mlp-128", "tensors", "hugging-face", "folder-2"], "mlp-128"),
)
@pytest.mark.parametrize("module", ["bare", "ours"])
def test_a_contender_does_its_rounds(tmp_path, module: str, setting: str) -> None:
    import importlib

    from peers.work import SETTINGS, Clock, Job
    from simulation import prepare

    prepare(tmp_path, "", [SETTINGS[setting]])
    clock = Clock(1)
    reached = importlib.import_module(f"peers.{module}").main(
        Job(setting, str(tmp_path), "", 1), clock
    )
    assert len(clock.seconds) == 1
    assert 0 < reached < 0.5  # random images
