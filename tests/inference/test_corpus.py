"""Generation over a corpus: what each prompt gives alone, in whatever runs, rows and processes it is written."""

import functools
import hashlib
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from helpers.forks import PACKAGE
from helpers.models import needs_rows, tiny_model
from helpers.rope_models import rope_model
from transformers import PreTrainedModel

from lex_hf import LexForCausalLM, blockwise
from lex_hf.data.documents import stream_documents
from lex_hf.data.tokenizers import byte_tokenizer
from lex_hf.inference import corpus
from lex_hf.inference.corpus import CorpusOptions, generate_corpus

pytestmark = needs_rows

TOKENIZER = byte_tokenizer()
IDS = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
PROMPTS = [f"{number} né " * (number % 5 + 1) + "x" * (number * 7 % 31) for number in range(17)]
GREEDY = CorpusOptions(max_new_tokens=9, do_sample=False, rows=3, piece=16, progress=False)
SAMPLED = CorpusOptions(max_new_tokens=9, temperature=0.7, top_p=0.9, seed=5, rows=3, piece=16, progress=False)


@functools.cache
def lex() -> LexForCausalLM:
    return tiny_model(**IDS)


@functools.cache
def llama() -> PreTrainedModel:
    return blockwise(rope_model(**IDS), 16, sinks=2)


def alone(model: PreTrainedModel, ids: list[int], seed: int | None = None, **settings: Any) -> list[int]:
    torch.manual_seed(0 if seed is None else seed)
    settings = {"do_sample": seed is not None, "max_new_tokens": 9, **settings}
    output: list[int] = model.generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()
    return output


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "continuations.jsonl").read_text().splitlines()]


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts, in one process."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    generate_corpus(lex(), TOKENIZER, PROMPTS, folder, SAMPLED)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**IDS).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


class TestContinuations:
    @pytest.mark.parametrize("make", [lex, llama])
    def test_each_is_what_generate_writes_alone(self, make: Any, tmp_path: Path) -> None:
        for options in (GREEDY, SAMPLED):
            folder = tmp_path / str(options.do_sample)
            result = generate_corpus(make(), TOKENIZER, PROMPTS, folder, options)
            found = lines(folder)
            assert [line["number"] for line in found] == list(range(len(PROMPTS)))
            for line, prompt in zip(found, PROMPTS, strict=True):
                ids = list(prompt.encode())
                seed = 5 + line["number"] if options.do_sample else None
                sampling = {"temperature": 0.7, "top_p": 0.9} if options.do_sample else {}
                assert line["tokens"] == alone(make(), ids, seed, **sampling)
                assert line["seed"] == seed
                assert line["text"] == TOKENIZER.decode(line["tokens"], skip_special_tokens=True)
                assert line["prompt_sha256"] == hashlib.sha256(prompt.encode()).hexdigest()
                assert (line["prompt_tokens"], line["cut"]) == (len(ids), 0)
            reasons = ["stop" if line["tokens"][-1] == 256 else "length" for line in found]
            assert [line["finish_reason"] for line in found] == reasons
            assert result.to_dict() == {
                "path": str(folder / "continuations.jsonl"),
                "prompts": len(PROMPTS),
                "finished_before": 0,
                "tokens": sum(len(line["tokens"]) for line in found),
                "prompt_tokens": sum(len(prompt.encode()) for prompt in PROMPTS),
                "cut": 0,
                "finish_reasons": dict(Counter(reasons)),
            }

    def test_rows_change_nothing(self, whole: Path, tmp_path: Path) -> None:
        generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path, replace(SAMPLED, rows=7, piece=5))
        assert content(tmp_path) == content(whole)

    def test_what_ends_them_is_written(self, tmp_path: Path) -> None:
        plain = alone(lex(), list(PROMPTS[3].encode()))
        character = next(chr(each) for each in plain[2:-1] if 32 < each < 127)
        last = plain.index(ord(character)) + 1
        options = replace(GREEDY, stop_strings=[character])
        generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path / "before", options)
        generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path / "at", replace(options, max_new_tokens=last))
        generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path / "none", replace(GREEDY, max_new_tokens=last))
        for name, reason in (("before", "stop"), ("at", "stop"), ("none", "length")):
            line = lines(tmp_path / name)[3]
            assert (line["tokens"], line["finish_reason"]) == (plain[:last], reason)

    def test_an_end_token_ends_them(self, tmp_path: Path) -> None:
        model = tiny_model(**IDS)
        model.generation_config.eos_token_id = alone(model, list(PROMPTS[0].encode()))[4]
        result = generate_corpus(model, TOKENIZER, PROMPTS[:1], tmp_path, GREEDY)
        assert result.finish_reasons == {"stop": 1}
        assert result.tokens <= 5

    def test_prompts_beside_them_and_only_the_end_of_long_ones(self, tmp_path: Path) -> None:
        options = replace(GREEDY, include_prompts=True, max_prompt_tokens=8)
        prompts = ["0123456789", "<|endoftext|>0123456789", "01234567"]
        result = generate_corpus(lex(), TOKENIZER, prompts, tmp_path, options)
        read = [list(b"23456789"), [256, *b"3456789"], list(b"01234567")]
        for line, prompt, ids, cut in zip(lines(tmp_path), prompts, read, (2, 3, 0), strict=True):
            assert line["prompt"] == prompt
            assert (line["prompt_tokens"], line["cut"]) == (8, cut)
            assert line["tokens"] == alone(lex(), ids)
        assert (result.cut, result.prompt_tokens) == (2, 24)

    def test_full_attention_needs_the_longest_prompt(self, tmp_path: Path) -> None:
        model = tiny_model(**IDS, attention_pattern=["blockwise", "full"], num_hidden_layers=2)
        with pytest.raises(ValueError, match="give max_prompt_tokens"):
            generate_corpus(model, TOKENIZER, PROMPTS, tmp_path, GREEDY)
        assert content(tmp_path) == {}
        generate_corpus(model, TOKENIZER, PROMPTS[:4], tmp_path, replace(GREEDY, max_prompt_tokens=20))
        for line, prompt in zip(lines(tmp_path), PROMPTS, strict=False):
            assert line["tokens"] == alone(model, list(prompt.encode())[-20:])

    def test_the_model_is_left_as_it_was(self, tmp_path: Path) -> None:
        model = tiny_model(**IDS).train()
        before = model.generation_config.to_dict()
        generate_corpus(model, TOKENIZER, PROMPTS[:2], tmp_path, SAMPLED)
        assert model.training
        assert model.generation_config.to_dict() == before


class Counting:
    """Prompts that tell how many of them were read, in the last reading, when the next one is."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.readings, self.ahead = folder, 0, [0]

    def __iter__(self) -> Iterator[str]:
        self.readings += 1
        self.ahead = []
        for index, prompt in enumerate(PROMPTS):
            part = self.folder / "continuations.part-0.jsonl"
            self.ahead.append(index - (part.read_bytes().count(b"\n") if part.exists() else 0))
            yield prompt


def test_few_prompts_are_read_ahead(tmp_path: Path) -> None:
    prompts = Counting(tmp_path)
    generate_corpus(lex(), TOKENIZER, prompts, tmp_path, replace(GREEDY, rows=2))
    assert prompts.readings == 2, "one to check them all"
    assert 2 <= max(prompts.ahead) <= 4, "each row has one, and for each one waits"


KILLED = """
import os, signal, sys
from pathlib import Path
from lex_hf.data.tokenizers import byte_tokenizer
from helpers.models import needs_rows, tiny_model
import test_corpus

folder = Path(sys.argv[1])
add = test_corpus.corpus.CorpusFolder.add

def kill_after_six(self, continuation):
    add(self, continuation)
    if len((folder / "continuations.part-0.jsonl").read_bytes().splitlines()) == 6:
        os.kill(os.getpid(), signal.SIGKILL)

test_corpus.corpus.CorpusFolder.add = kill_after_six
model = test_corpus.LexForCausalLM.from_pretrained(sys.argv[2])
test_corpus.generate_corpus(model, byte_tokenizer(), test_corpus.PROMPTS, folder, test_corpus.SAMPLED)
"""


class TestResuming:
    @pytest.mark.processes
    def test_a_killed_run_continues_where_it_was(self, saved: Path, whole: Path, tmp_path: Path) -> None:
        model, folder = LexForCausalLM.from_pretrained(saved), tmp_path / "run"
        generate_corpus(model, TOKENIZER, PROMPTS, tmp_path / "whole", SAMPLED)
        assert content(tmp_path / "whole")["continuations.jsonl"] == content(whole)["continuations.jsonl"]

        environment = {"PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
        killed = PACKAGE.run("-c", KILLED, folder, saved, env={**os.environ, **environment})
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        part = folder / "continuations.part-0.jsonl"
        kept = part.read_bytes()
        assert kept.count(b"\n") == 6
        part.write_bytes(kept + kept[:100])  # as if the kill had come while writing

        result = generate_corpus(model, TOKENIZER, PROMPTS, folder, replace(SAMPLED, rows=5))
        assert (result.finished_before, result.prompts) == (6, len(PROMPTS))
        assert content(folder) == content(tmp_path / "whole")

    def test_what_ctrl_c_stops_continues(self, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        add, added = corpus.CorpusFolder.add, []

        def interrupt_after_four(self: Any, continuation: Any) -> None:
            add(self, continuation)
            added.append(continuation)
            if len(added) == 4:
                signal.raise_signal(signal.SIGINT)

        try:
            monkeypatch.setattr(corpus.CorpusFolder, "add", interrupt_after_four)
            with pytest.raises(KeyboardInterrupt, match="What is finished is in"):
                generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path, SAMPLED)
        finally:
            monkeypatch.undo()
            signal.signal(signal.SIGINT, before)
        assert "lex-hf-batching" not in {thread.name for thread in threading.enumerate()}
        assert set(content(tmp_path)) == {"settings.json", "continuations.part-0.jsonl"}
        assert generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path, SAMPLED).finished_before == 4
        assert content(tmp_path) == content(whole)

    def test_a_finished_run_generates_and_writes_nothing(self, whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
        monkeypatch.setattr(corpus, "_Run", None)
        result = generate_corpus(lex(), TOKENIZER, PROMPTS, whole, SAMPLED)
        assert result.finished_before == result.prompts == len(PROMPTS)
        assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before

    def test_further_prompts_are_continued_and_fewer_or_others_refused(self, whole: Path, tmp_path: Path) -> None:
        generate_corpus(lex(), TOKENIZER, PROMPTS[:5], tmp_path, SAMPLED)
        before = content(tmp_path)
        for prompts, message in (
            (PROMPTS[:4], "holds a continuation of prompt 4 .* only 4 prompts"),
            ([*PROMPTS[:3], "another", *PROMPTS[4:]], "Prompt 3 .* is not the text that is continued"),
        ):
            with pytest.raises(ValueError, match=message):
                generate_corpus(lex(), TOKENIZER, prompts, tmp_path, SAMPLED)
            assert content(tmp_path) == before
        assert generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path, SAMPLED).finished_before == 5
        assert content(tmp_path) == content(whole)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (replace(SAMPLED, max_new_tokens=8), "max_new_tokens = 9, not 8"),
            (replace(SAMPLED, seed=6), "seed = 5, not 6"),
            (replace(SAMPLED, top_p=None), "top_p = 0.9, not None"),
            (replace(SAMPLED, stop_strings=["a"]), r"stop_strings = \[\], not \['a'\]"),
            (GREEDY, "do_sample = True, not False"),
        ],
    )
    def test_other_settings_are_named(self, options: CorpusOptions, message: str, whole: Path) -> None:
        before = content(whole)
        with pytest.raises(ValueError, match=message):
            generate_corpus(lex(), TOKENIZER, PROMPTS, whole, options)
        assert content(whole) == before

    def test_other_models_and_tokenizers_are_named(self, whole: Path) -> None:
        other, words = tiny_model(**IDS, seed=1), byte_tokenizer()
        words.add_tokens(["quick"])
        ending = tiny_model(**IDS)
        ending.generation_config.eos_token_id = 7
        for model, tokenizer, message in (
            (other, TOKENIZER, "generated with model = '.*', not '"),
            (tiny_model(**IDS).bfloat16(), TOKENIZER, "generated with dtype = 'float32', not 'bfloat16'"),
            (ending, TOKENIZER, "generated with generation_config = "),
            (lex(), words, "generated with tokenizer = "),
        ):
            with pytest.raises(ValueError, match=message):
                generate_corpus(model, tokenizer, PROMPTS, whole, SAMPLED)

    def test_a_tokenizer_that_was_used_otherwise_is_the_same(self, whole: Path) -> None:
        used = byte_tokenizer()
        used(["a", "bcd"], padding=True, truncation=True, max_length=2)
        assert generate_corpus(lex(), used, PROMPTS, whole, SAMPLED).finished_before == len(PROMPTS)


REFUSED = """
import sys
from lex_hf.cli.commands import app

print("status", app(sys.argv[1:], standalone_mode=False))
"""


@pytest.mark.processes
def test_two_processes_write_what_one_does(saved: Path, tmp_path: Path) -> None:
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    sizes = ["--max-new-tokens", "9", "--seed", "5", "--rows", "3", "--device", "cpu"]
    command = [
        "-m",
        "lex_hf",
        "generate-corpus",
        saved,
        source,
        *sizes,
        "--text-field",
        "prompt",
        "--json",
        "--output",
    ]
    one, two = tmp_path / "one", tmp_path / "two"
    alone = PACKAGE.run(*command, one)
    assert alone.returncode == 0, alone.stderr

    # As three processes have left it, one of which was killed while writing.
    two.mkdir()
    (two / "settings.json").write_bytes((one / "settings.json").read_bytes())
    finished = (one / "continuations.jsonl").read_bytes().splitlines(keepends=True)
    (two / "continuations.part-2.jsonl").write_bytes(finished[5] + finished[2] + finished[8][:30])
    run = PACKAGE.run_together(2, *command, two)
    assert run.returncode == 0, run.stderr
    assert content(two) == content(one)
    (printed,) = map(json.loads, run.stdout.splitlines())  # by one process
    expected = json.loads(alone.stdout)
    assert printed == expected | {"finished_before": 2, "path": str(two / "continuations.jsonl")}
    assert "9/9" in run.stderr, "the share of the first process"

    with FileLock(two / ".corpus.lock"):
        refused = PACKAGE.run_together(2, "-c", REFUSED, *command[2:], two)
    assert refused.returncode == 0, refused.stderr
    assert refused.stdout == "status 1\n" * 2, "no process waits for the first one"
    assert refused.stderr.count("Error: Another run writes to") == 2


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"max_new_tokens": 0}, "max_new_tokens = 0: it must be a whole number of at least 1"),
            ({"max_new_tokens": None}, "max_new_tokens = None"),
            ({"rows": True}, "rows = True"),
            ({"piece": 1.5}, "piece = 1.5"),
            ({"max_prompt_tokens": 1}, "max_prompt_tokens = 1: .* at least 2"),
            ({"seed": -1}, "seed = -1"),
            ({"stop_strings": "end"}, "stop_strings = 'end': it must be a list"),
            ({"stop_strings": [""]}, "none of them empty"),
        ],
    )
    def test_options(self, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            CorpusOptions(**fields)

    @pytest.mark.parametrize(
        ("prompts", "message"),
        [
            ("text", "a single string"),
            (iter(PROMPTS), "an iterator, which can be read only once"),
            ([], "no prompts"),
            (["a", 7], r"Prompt 1 \(counted from 0\) is a int"),
        ],
    )
    def test_prompts(self, prompts: Any, message: str, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=message):
            generate_corpus(lex(), TOKENIZER, prompts, tmp_path / "run", GREEDY)
        assert not (tmp_path / "run").exists()

    def test_an_empty_prompt_without_a_start_token(self, tmp_path: Path) -> None:
        nameless = byte_tokenizer()
        nameless.bos_token = None
        with pytest.raises(ValueError, match=r"Prompt 1 .* is empty, and the tokenizer has no start token"):
            generate_corpus(lex(), nameless, ["a", ""], tmp_path / "run", GREEDY)
        generate_corpus(lex(), TOKENIZER, ["a", ""], tmp_path / "run", GREEDY)
        assert lines(tmp_path / "run")[1]["tokens"] == alone(lex(), [256])

    def test_a_model_whose_cache_grows(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"make it read in blocks first, with lex_hf\.blockwise"):
            generate_corpus(rope_model(**IDS), TOKENIZER, PROMPTS, tmp_path / "run", GREEDY)
        assert not (tmp_path / "run").exists()

    def test_a_prompt_of_other_ids_stops_the_run_and_keeps_what_is_finished(self, tmp_path: Path) -> None:
        words = byte_tokenizer()
        words.add_tokens(["quick"])
        prompts = [*PROMPTS[:6], "a quick fox"]
        with pytest.raises(ValueError, match=r"Prompt 6 \(counted from 0\), 'a quick fox': .* token id 257"):
            generate_corpus(lex(), words, prompts, tmp_path, replace(GREEDY, rows=1))
        found = (tmp_path / "continuations.part-0.jsonl").read_text().splitlines()
        assert [json.loads(line)["number"] for line in found] == list(range(len(found)))
        assert 4 <= len(found) <= 6, "one is continued and one waits"

    def test_a_prompt_that_fails_is_named(self, tmp_path: Path) -> None:
        model = tiny_model(**IDS, tie_word_embeddings=False)
        with torch.no_grad():
            model.get_input_embeddings().weight[ord("!")] = torch.nan
        with pytest.raises(ValueError, match=r"Prompt 2 \(counted from 0\), 'b!', cannot be continued: .*nan"):
            generate_corpus(model, TOKENIZER, ["a", "b", "b!"], tmp_path, replace(SAMPLED, rows=1, max_new_tokens=1))

    def test_folders_of_others(self, whole: Path, tmp_path: Path) -> None:
        def call() -> None:
            generate_corpus(lex(), TOKENIZER, PROMPTS, tmp_path / "run", SAMPLED)

        (tmp_path / "run").write_text("a file")
        with pytest.raises(ValueError, match="is a file, not a folder"):
            call()
        (tmp_path / "run").unlink()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "thesis.tex").write_text("precious")
        with pytest.raises(ValueError, match=r"is not empty, and holds no settings\.json"):
            call()
        (tmp_path / "run" / "thesis.tex").rename(tmp_path / "run" / "settings.json")
        with pytest.raises(ValueError, match=r"settings\.json is not JSON"):
            call()
        (tmp_path / "run" / "settings.json").write_bytes((whole / "settings.json").read_bytes())
        with FileLock(tmp_path / "run" / ".corpus.lock"), pytest.raises(ValueError, match="Another run writes to"):
            call()
        part = tmp_path / "run" / "continuations.part-0.jsonl"
        for text, message in (
            ('{"number": 0}\n', "the line at byte 0 is no continuation"),
            ("precious", "ends with something that is not a continuation"),
        ):
            part.write_text(text)
            with pytest.raises(ValueError, match=message):
                call()
            assert part.read_text() == text


def test_documents_as_prompts(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "one"}\n\n{"text": ""}\n{"text": "two"}\n')
    (tmp_path / "three.txt").write_text("three")
    documents = stream_documents([tmp_path / "prompts.jsonl", tmp_path / "three.txt"])
    options = replace(GREEDY, include_prompts=True)
    generate_corpus(lex(), TOKENIZER, documents, tmp_path / "run", options)
    assert [line["prompt"] for line in lines(tmp_path / "run")] == ["one", "two", "three"]
