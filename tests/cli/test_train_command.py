"""The command train: recipes of resumed runs, texts and values that are refused, and what is left behind."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import SMALL, lex, setting
from helpers.files import contents

from lex_hf.training.recipes import load_recipe


class TestCommand:
    def test_keeps_the_truth_in_the_recipe(self, tmp_path: Path, text: Path) -> None:
        folder = tmp_path / "out"
        options = [*SMALL, *setting(max_steps=4, save_steps=2, warmup_steps=0)]
        command = ["train", "tiny", text, "--output", folder, *options]
        assert lex(*command).exit_code == 0
        shutil.rmtree(folder / "checkpoint-4")
        written = (folder / "recipe.yaml").read_text()
        other = [*command, "--resume", *setting(learning_rate=1e-4, seed=1), "--json"]
        refused = lex(*other)
        assert refused.exit_code == 1
        message = " ".join(refused.stderr.split())
        assert "learning_rate: was 0.002, now 0.0001; seed: was 0, now 1" in message
        assert "--allow-change learning_rate --allow-change seed" in message
        assert (folder / "recipe.yaml").read_text() == written
        result = lex(*other, "--allow-change", "learning_rate", "--allow-change", "seed")
        assert result.exit_code == 0, result.output
        kept = (folder / "recipe.yaml").read_text()
        assert "# Resumed with changes: up to step 2 learning_rate was 0.002, then 0.0001." in kept
        assert load_recipe(folder / "recipe.yaml").training["learning_rate"] == 1e-4

    @pytest.mark.parametrize("streaming", ["false", "true"])
    def test_refuses_another_text(self, tmp_path: Path, text: Path, streaming: str) -> None:
        options = [*SMALL, *setting(max_steps=4, save_steps=2, streaming=streaming)]
        assert lex("train", "tiny", text, "--output", tmp_path / "out", *options).exit_code == 0
        shutil.rmtree(tmp_path / "out" / "checkpoint-4")
        before = contents(tmp_path / "out")
        other = tmp_path / "other.txt"
        other.write_text(text.read_text().replace("fox", "dog"))
        for source in (other,):
            result = lex("train", "tiny", source, "--output", tmp_path / "out", *options, "--resume")
            assert result.exit_code == 1
            assert "data" in " ".join(result.stderr.split())
        assert contents(tmp_path / "out") == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (setting(max_steps=0), "max_steps = 0: it must be a number, at least 1"),
            (setting(per_device_train_batch_size=0), "per_device_train_batch_size = 0"),
            (setting(examples_per_step=0), "data.examples_per_step = 0: it must be at least 1"),
            (setting(length=0), "data.length = 0: it must be at least 2"),
            (setting(shuffle_buffer=0), "data.shuffle_buffer = 0"),
            (setting(learning_rate="-.inf"), "learning_rate = -inf"),
            (setting(max_steps=10**20), "too large a number"),
            (setting(auto_find_batch_size="true"), "use per_device_train_batch_size"),
        ],
    )
    @pytest.mark.parametrize("dry", [True, False])
    def test_impossible_values(
        self,
        tmp_path: Path,
        text: Path,
        options: list[str],
        message: str,
        dry: bool,
    ) -> None:
        result = lex("train", "tiny", text, "--output", tmp_path / "out", *options, *(["--dry-run"] if dry else []))
        assert result.exit_code == 1, result.output
        assert message in " ".join(result.stderr.split())
        assert not (tmp_path / "out").exists()

    def test_leaves_nothing_in_the_way_of_the_next_try(self, tmp_path: Path, text: Path) -> None:
        command = ["train", "tiny", text, "--output", tmp_path / "out", *SMALL, *setting(max_steps=2)]
        missing = lex(*command, *setting(use_liger_kernel="true"))
        assert missing.exit_code == 1
        assert "needs what is not available here" in missing.stderr
        assert not (tmp_path / "out").exists()
        assert lex(*command).exit_code == 0

    def test_changes_are_allowed_when_resuming_only(self, tmp_path: Path, text: Path) -> None:
        result = lex("train", "tiny", text, "--output", tmp_path / "out", "--allow-change", "seed")
        assert result.exit_code == 1
        assert "(--resume)" in result.stderr
        assert not (tmp_path / "out").exists()

    def test_ctrl_c_before_the_first_step(
        self,
        tmp_path: Path,
        text: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        def interrupt(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr("transformers.PreTrainedTokenizerFast.__call__", interrupt)
        result = lex("train", "tiny", text, "--output", tmp_path / "new" / "out", *SMALL)
        assert (result.exit_code, "Traceback" in result.stderr) == (130, False)
        assert not (tmp_path / "new").exists()
