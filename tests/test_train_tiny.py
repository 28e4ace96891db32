"""The trainer of the tiny checkpoint: its corpus, tokenizer, model, and the folder it writes."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
tiny_corpus = importlib.import_module("tiny_corpus")
train_tiny = importlib.import_module("train_tiny")

END_OF_TEXT = tiny_corpus.END_OF_TEXT
CONFIG = train_tiny.TinyConfig(
    vocab_size=384,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context=64,
)
RECIPE = train_tiny.Recipe(steps=20, batch_size=4, warmup_steps=4)
TRAIN_TEXT, HELDOUT_TEXT = tiny_corpus.split_corpus()
TOKENIZER = tiny_corpus.train_tokenizer(TRAIN_TEXT, CONFIG.vocab_size)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.tensor(TOKENIZER.encode(TRAIN_TEXT).ids)


@pytest.fixture
def random_model():
    """Every weight matters: norms are not 1, and no layer is the identity it starts as."""
    model = train_tiny.TinyLlama(CONFIG).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if parameter.dim() == 1 else 0.0, std=0.2)
        parameter.data = parameter.data.bfloat16().float()
    return model


def normalized_paragraphs(text: str) -> set[str]:
    return {
        " ".join(paragraph.split())
        for document in text.split(END_OF_TEXT)
        for paragraph in document.split("\n\n")
    }


def topics_with(**others: str) -> dict[str, str]:
    return {name: f"The text of {name}." for name in tiny_corpus.HELD_OUT_TOPICS} | others


def test_split_is_deterministic_whatever_the_order_of_the_topics():
    shuffled = dict(reversed(tiny_corpus.python_topics.items()))
    assert tiny_corpus.split_corpus() == (TRAIN_TEXT, HELDOUT_TEXT)
    assert tiny_corpus.split_corpus(shuffled) == (TRAIN_TEXT, HELDOUT_TEXT)


def test_held_out_text_is_whole_topics_of_about_five_percent():
    documents = [tiny_corpus.python_topics[name].strip() for name in tiny_corpus.HELD_OUT_TOPICS]
    assert HELDOUT_TEXT.split(END_OF_TEXT) == ["", *documents]
    assert 0.03 < len(HELDOUT_TEXT) / (len(HELDOUT_TEXT) + len(TRAIN_TEXT)) < 0.07


def test_no_held_out_paragraph_stands_in_the_training_text():
    shared = normalized_paragraphs(TRAIN_TEXT) & normalized_paragraphs(HELDOUT_TEXT)
    assert all(len(paragraph) < tiny_corpus.MIN_REPEATED_CHARS for paragraph in shared)


def test_training_text_repeats_no_long_paragraph():
    long = [
        " ".join(paragraph.split())
        for document in TRAIN_TEXT.split(END_OF_TEXT)
        for paragraph in document.split("\n\n")
        if len(" ".join(paragraph.split())) >= tiny_corpus.MIN_REPEATED_CHARS
    ]
    assert len(long) == len(set(long))


def test_repeated_paragraphs_are_dropped_whatever_their_spacing():
    sentence = "A paragraph that is long enough to belong to one topic and not to the language."
    first = f"{sentence}\n\n" + "What only the first of the two topics says of this. " * 4
    second = sentence.replace(" ", "\n   ", 3) + "\n\n" + "What only the second topic says. " * 4
    train_text, _ = tiny_corpus.split_corpus(topics_with(first=first, second=second))
    assert train_text == (
        END_OF_TEXT + first.strip() + END_OF_TEXT + second.strip().split("\n\n")[1]
    )


def test_short_repeated_paragraphs_stay():
    first, second = (f"{name} topic's own text, at length.\n\nNote:" for name in ("One", "Another"))
    train_text, _ = tiny_corpus.split_corpus(topics_with(first=first, second=second))
    assert train_text.count("Note:") == 2


def test_a_topic_of_which_little_remains_is_dropped():
    section = "A section that another topic contains word for word, so that it is dropped here."
    chapter = f"Chapter\n\n{section}\n\nAnd a great deal more that only the chapter has to say."
    train_text, _ = tiny_corpus.split_corpus(topics_with(part=f"Part\n\n{section}", all=chapter))
    assert train_text == END_OF_TEXT + chapter


def test_missing_held_out_topic_is_named():
    topics = topics_with()
    del topics["slicings"]
    with pytest.raises(ValueError, match=r"topics: got none named \['slicings'\]"):
        tiny_corpus.split_corpus(topics)


@given(st.text())
def test_any_text_round_trips(text):
    ids = TOKENIZER.encode(text).ids
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_tokenizer_training_is_reproducible():
    again = tiny_corpus.train_tokenizer(TRAIN_TEXT, CONFIG.vocab_size)
    assert again.to_str() == TOKENIZER.to_str()


def test_end_of_text_is_one_special_token_and_none_is_added():
    assert TOKENIZER.token_to_id(END_OF_TEXT) == 0
    assert TOKENIZER.encode(END_OF_TEXT).ids == [0]
    assert 0 not in TOKENIZER.encode("The lambda expression").ids
    assert TOKENIZER.decode([0]) == ""


@pytest.mark.parametrize(("text", "vocab_size"), [("too short", 1024), ("any text", 256)])
def test_impossible_vocabulary_is_refused(text, vocab_size):
    with pytest.raises(ValueError, match=f"vocab_size: got {vocab_size}, expected at least 257"):
        tiny_corpus.train_tokenizer(text, vocab_size)


def test_loss_falls(tokens):
    losses = []
    train_tiny.train(CONFIG, RECIPE, tokens, lambda step, loss: losses.append(loss))
    assert len(losses) == RECIPE.steps
    assert losses[0] == pytest.approx(torch.tensor(384.0).log().item(), abs=0.3)
    assert sum(losses[-5:]) / 5 < losses[0] - 0.7


def test_seed_decides_the_weights(tokens):
    def weights(seed):
        recipe = train_tiny.Recipe(steps=3, batch_size=2, warmup_steps=1, seed=seed)
        return train_tiny.train(CONFIG, recipe, tokens).state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("length", [0, CONFIG.context])
def test_too_few_tokens_are_refused(length):
    with pytest.raises(ValueError, match=f"tokens: got {length}, expected more than the context"):
        train_tiny.train(CONFIG, RECIPE, torch.zeros(length, dtype=torch.int64))


def test_learning_rate_warms_up_and_ends_at_zero():
    factors = [train_tiny.lr_factor(step, RECIPE) for step in range(RECIPE.steps + 1)]
    peak = RECIPE.warmup_steps
    assert factors[peak] == max(factors) == 1.0
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert factors[-1] == pytest.approx(0.0, abs=1e-12)


def test_transformers_reads_the_folder_and_gives_the_same_logits(random_model, tmp_path):
    train_tiny.save(random_model, TOKENIZER, tmp_path)
    reference, loading = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = torch.randint(CONFIG.vocab_size, (2, CONFIG.context))
    with torch.inference_mode():
        expected = reference.eval()(tokens).logits
        torch.testing.assert_close(random_model(tokens), expected, rtol=1e-4, atol=1e-4)


def test_transformers_reads_config_and_tokenizer(random_model, tmp_path):
    train_tiny.save(random_model, TOKENIZER, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    generation = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.dtype == torch.bfloat16
    assert config.tie_word_embeddings
    assert generation.eos_token_id == config.eos_token_id == tokenizer.eos_token_id == 0
    text = 'The "lambda" expression — naïve\n   indented'
    assert tokenizer(text)["input_ids"] == TOKENIZER.encode(text).ids


def test_script_writes_a_folder_and_says_what_it_was_made_from(tmp_path, monkeypatch, capsys):
    out, threads = tmp_path / "new" / "folder", torch.get_num_threads()
    argv = ["train_tiny.py", "--out", out, "--steps", 1, "--seed", 3, "--threads", threads]
    monkeypatch.setattr(sys, "argv", [str(argument) for argument in argv])
    train_tiny.main()
    assert "step 1/1  loss 6." in capsys.readouterr().out
    log = json.loads((out / "training_log.json").read_text())
    assert log["corpus_sha256"] == tiny_corpus.sha256_of(TRAIN_TEXT)
    assert log["python"] == ".".join(str(part) for part in sys.version_info[:3])
    assert log["recipe"]["seed"] == 3
    assert log["recipe"]["steps"] == 1
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == train_tiny.TinyConfig.vocab_size
    model = transformers.LlamaForCausalLM.from_pretrained(out)
    assert model.num_parameters() == 1_771_200
