"""Decoders with a cache: the same scores, the same text, in a folder of onnxruntime-genai."""

import json

import pytest
import torch
from typer.testing import CliRunner

import compress
from compress import MaxFirstToken, MinTokensPerSecond, QuantizeStatic, QuantizeWeights
from compress.artifacts.artifact import Artifact
from compress.cli import app
from compress.common.errors import StageFailed
from compress.export import ExportCompressedTensors, ExportGenai, GenaiModel, OnnxModel
from compress.export.genai.runtime import (
    GENAI,
    GreedyText,
    Sampling,
    next_scores,
    next_tokens,
    next_tokens_unlocked,
    open_folder,
)
from compress.export.genai.session import CachedSession, CacheProof
from tests.export.genai.conftest import LAYERS
from tests.export.tiny_decoder import (
    LONGEST,
    VOCABULARY,
    context_for,
    decoder,
    texts,
)

needs_genai = pytest.mark.skipif(
    GENAI.missing(), reason="to run these tests: pip install -e '.[genai]'"
)

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(llama, tmp_path_factory: pytest.TempPathFactory) -> GenaiModel:
    root = tmp_path_factory.mktemp("genai") / "genai"
    return ExportGenai()(llama, context_for(llama, root))


@pytest.fixture(scope="module")
def folder_in_four_bits(llama, in_four_bits, tmp_path_factory) -> GenaiModel:
    root = tmp_path_factory.mktemp("genai4") / "genai"
    return ExportGenai()(in_four_bits, context_for(llama, root))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> GenaiModel:
    """Return a folder of a decoder of one layer, for contexts of 40 tokens."""
    root = tmp_path_factory.mktemp("short")
    source = decoder(root / "source", hidden_size=32, num_hidden_layers=1)
    return ExportGenai(context=40)(source, context_for(source, root / "genai"))


def test_the_float_decoder_writes_the_models_text(llama, folder) -> None:
    facts = folder.manifest.facts
    assert facts["greedy_tokens"] == facts["equal_tokens"] == LONGEST - 16
    assert max(facts["scores_error"], facts["steps_error"], facts["greedy_error"]) < 1e-5
    assert facts["operators"]["GroupQueryAttention"] == LAYERS
    assert facts["rotary_in_attention"] == f"{LAYERS} of {LAYERS} layers"
    # The first norm has nothing to add; onnxruntime fuses it, as it divides by its root.
    assert facts["operators"]["Div"] == 1
    assert facts["operators"]["SkipSimplifiedLayerNormalization"] == 2 * LAYERS
    assert "Reshape" not in facts["operators"]
    session = CachedSession(folder.payload_path, threads=1)
    ids, module = torch.tensor([[72, 101, 108]]), llama.load()
    for _ in range(20):
        ids = torch.cat([ids, module(ids).logits[:, -1:].argmax(-1)], 1)
    assert session.continue_greedily(ids[:, :3], 20)[0].tolist() == ids[:, 3:].tolist()


def test_the_folder_says_what_it_holds(folder) -> None:
    model = json.loads((folder.path / "genai_config.json").read_text())["model"]
    assert (model["vocab_size"], model["context_length"]) == (VOCABULARY, LONGEST)
    assert (model["bos_token_id"], model["eos_token_id"]) == (256, 256)
    inputs, outputs = model["decoder"]["inputs"], model["decoder"]["outputs"]
    named = [i.name for i in CachedSession(folder.payload_path, 1).session.get_inputs()]
    assert named[:4] == [
        *(inputs["input_ids"], inputs["attention_mask"]),
        *(inputs["past_key_names"] % 0, inputs["past_value_names"] % 0),
    ]
    assert outputs["present_key_names"] % 0 == "present.0.key"
    assert (folder.path / "tokenizer.json").is_file()


def test_it_opens_as_a_model_without_a_cache(llama, folder, tmp_path) -> None:
    context = context_for(llama, tmp_path / "any")
    assert context.score(folder) == pytest.approx(context.score(llama), rel=1e-5)
    Artifact.from_directory(folder.path).verify()


def assert_nearer(model: Artifact, quantized: Artifact, folder: Artifact) -> None:
    """Assert that the folder is far nearer to the quantized graph than that to the float model."""
    ids = next(texts().batches("val")).inputs[0]
    scores = [made.open()(ids)[0] for made in (model, quantized, folder)]
    assert (scores[1] - scores[2]).norm() < 0.2 * (scores[0] - scores[1]).norm()


@pytest.mark.slow
def test_four_bits_stay_in_the_file(llama, folder, in_four_bits, folder_in_four_bits) -> None:
    facts = folder_in_four_bits.manifest.facts
    # Queries, keys and values of a layer are one product.
    assert facts["operators"]["MatMulNBits"] == 5 * LAYERS + 1
    assert facts["operators"]["GatherBlockQuantized"] == 1
    assert folder_in_four_bits.payload_bytes < 0.4 * folder.payload_bytes
    assert facts["equal_tokens"] == facts["greedy_tokens"] or "near_tie" in facts
    assert_nearer(llama, in_four_bits, folder_in_four_bits)


@pytest.mark.slow
def test_experts_of_four_bits_stay_in_the_file(tmp_path) -> None:
    sizes = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2}
    mixture = decoder(tmp_path / "mixture", "Mixtral", **sizes)
    context = context_for(mixture, tmp_path / "quantized")
    packed = QuantizeWeights(bits=4, group_size=32, method="hqq")(mixture, context)
    counts = packed.manifest.facts["quantized_operators"]
    assert counts == {"embedding": 1, "experts": 2, "linear": 6}
    for name, parts in (("gate_up_proj", (192, 32)), ("down_proj", (64, 48))):
        stem = f"model_layers_0_mlp_experts_{name}_packed"
        (key,) = (k for k in packed.program().state_dict if k.endswith(stem))
        assert packed.program().state_dict[key].shape == (4, *parts)
    exported = ExportGenai()(packed, context_for(mixture, tmp_path / "genai"))
    facts = exported.manifest.facts
    assert facts["operators"]["GatherBlockQuantized"] == 2
    assert facts["equal_tokens"] == facts["greedy_tokens"] or "near_tie" in facts
    assert exported.payload_bytes < 0.35 * mixture.payload_bytes
    assert mixture.load().config._experts_implementation == "grouped_mm"
    with pytest.raises(
        StageFailed, match=r"experts.gate_up_proj holds experts in few bits, for wh"
    ):
        ExportCompressedTensors().run(packed, context_for(mixture, tmp_path / "folder"))


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_decoder_of_125_million_weights_in_four_bits(tmp_path) -> None:
    layers = 20
    source = decoder(
        tmp_path,
        scale=1,  # larger, so wide and deep a random model multiplies what is rounded
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
    )
    assert 125e6 < source.parameters() < 130e6
    context = context_for(source, tmp_path / "quantized")
    quantized = QuantizeWeights(method="rtn", symmetric=True)(source, context)
    made = ExportGenai()(quantized, context.with_root(tmp_path / "genai"))
    facts = made.manifest.facts
    assert facts["equal_tokens"] == facts["greedy_tokens"] or "near_tie" in facts
    assert facts["operators"]["MatMulNBits"] == 5 * layers + 1
    # A scale of 32 bits for 32 weights of 4: 5 bits a weight.
    assert made.payload_bytes < 1.02 * 5 / 32 * source.payload_bytes
    assert_nearer(source, quantized, made)


def test_a_cached_folder_is_compared_again(llama, folder, tmp_path) -> None:
    context = context_for(llama, tmp_path / "any")
    ExportGenai().check_parity(llama, folder, context)
    module = llama.load()
    with torch.no_grad():
        module.lm_head.weight[5] += 1
    other = llama.derive(tmp_path / "other", module)
    with pytest.raises(StageFailed, match="scores differ from the source's by"):
        ExportGenai().check_parity(other, folder, context)


class Forgetful(CachedSession):
    """A decoder that loses its cache."""

    def __call__(self, ids, cache=None):
        return super().__call__(ids, None)


class Stubborn(CachedSession):
    """A decoder that generates another token than its scores say."""

    def continue_greedily(self, prompt, count):
        tokens, scores = super().continue_greedily(prompt, count)
        tokens[0, -1] = scores[0, -1].argmin()
        return tokens, scores


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Forgetful, "16 tokens in 16 calls have other scores than in one"),
        (Stubborn, f"as token {LONGEST - 16} of .* expected"),
    ],
)
def test_what_a_cache_may_break_is_found(llama, folder, tmp_path, kind, problem) -> None:
    session = kind(folder.payload_path, 1)
    context = context_for(llama, tmp_path / "any")
    with pytest.raises(StageFailed, match=problem):
        CacheProof(llama, session, context, VOCABULARY, LONGEST).check()


def test_a_baseline_is_proven_by_its_scores_alone(llama, tmp_path, monkeypatch) -> None:
    stage = ExportGenai(context=LONGEST)
    made = stage.run_as_baseline(llama, context_for(llama, tmp_path / "made"))
    assert made.manifest.facts["scores_error"] < 1e-4
    assert "greedy_tokens" not in made.manifest.facts
    answer = CachedSession.__call__
    monkeypatch.setattr(
        CachedSession, "__call__", lambda *args: (answer(*args)[0] + 1, answer(*args)[1])
    )
    with pytest.raises(StageFailed, match="scores differ from the source's"):
        stage.run_as_baseline(llama, context_for(llama, tmp_path / "wrong"))


def test_a_shorter_context_is_proven_within_it(short) -> None:
    assert short.manifest.facts["greedy_tokens"] == 40 - 16
    text = GreedyText.read(short.path)
    session = CachedSession(short.payload_path, 1)
    tokens, _ = session.continue_greedily(torch.tensor([text.prompt]), 24)
    assert tokens[0].tolist() == [*text.tokens]


@pytest.mark.slow
def test_masks_that_pad_at_the_beginning_are_refused(short) -> None:
    from compress.export.genai.session import prefill_predictor

    names = ("input_ids", "attention_mask")
    spec = compress.TensorSpec(name="input_ids", shape=("batch", "length"), dtype="int64")
    signature = compress.Signature(inputs=[spec.model_copy(update={"name": n}) for n in names])
    predict = prefill_predictor(short.payload_path, 1, signature)
    ids, mask = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[1, 1, 1, 0]])
    full = predict(ids, torch.ones_like(mask))[0]
    assert torch.equal(predict(ids, mask)[0][:, :3], full[:, :3])
    with pytest.raises(ValueError, match="pad at the end"):
        predict(ids, mask.flip(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes", "rotary"),
    [
        # Their files' operators are those of Llama in the tests above; Phi's are not, nor GPT-2's.
        pytest.param("Mistral", {"sliding_window": 8}, "2 of 2", marks=pytest.mark.soak),
        pytest.param("Qwen2", {"tie_word_embeddings": True}, "2 of 2", marks=pytest.mark.soak),
        (
            "Phi",
            {"partial_rotary_factor": 0.5, "hidden_size": 128, "num_hidden_layers": 1},
            "1 of 1",
        ),
        pytest.param("Gemma", {"head_dim": 16}, "2 of 2", marks=pytest.mark.soak),
        pytest.param(
            "GPT2",
            {"n_embd": 64, "num_hidden_layers": 1, "n_head": 4, "n_positions": LONGEST},
            "0 of 1",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_other_architectures(tmp_path, kind, sizes, rotary) -> None:
    source = decoder(tmp_path, kind, **sizes)
    made = ExportGenai()(source, context_for(source, tmp_path / "genai"))
    facts = made.manifest.facts
    assert facts["equal_tokens"] == facts["greedy_tokens"]
    assert facts["scores_error"] < 1e-4
    assert facts["rotary_in_attention"] == f"{rotary} layers"


def test_what_is_no_decoder_is_refused(mlp, llama, tmp_path) -> None:
    context = context_for(llama, tmp_path / "genai")
    with pytest.raises(StageFailed, match="takes a language model of transformers, found"):
        ExportGenai()(mlp, context)
    with pytest.raises(StageFailed, match="context: found 97, and the model has 96 positions"):
        ExportGenai(context=97)(llama, context)
    reason = ExportGenai().unsupported_input_reason(QuantizeStatic().activation_formats)
    assert "takes float32 models, and those of quantize_weights; found uint8" in reason
    problem = MinTokensPerSecond(at=1).unsuitable_artifact(OnnxModel)
    assert problem == "is for export_genai, found onnx"


@pytest.mark.slow
@needs_genai
def test_genai_opens_the_folder_and_generates(folder, folder_in_four_bits, capfd) -> None:
    for made in (folder, folder_in_four_bits):
        assert str(made.manifest.facts["opened_by"]).startswith("onnxruntime-genai ")
    arguments = ["generate", str(folder.path), "Hé", "--tokens", "9", "--json"]
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == 0
    found = json.loads(capfd.readouterr().out)
    assert found["prompt"] == "Hé"
    tokenizer = compress.Artifact.from_directory(folder.path).carried_files()["tokenizer.json"]
    from tokenizers import Tokenizer

    read = Tokenizer.from_str(tokenizer.decode())
    ids = torch.tensor([read.encode("Hé").ids])
    expected, _ = CachedSession(folder.payload_path, 1).continue_greedily(ids, 9)
    assert found["token_ids"] == expected[0].tolist()
    assert found["text"] == read.decode(found["token_ids"])


@needs_genai
def test_another_text_than_the_proven_one_is_found(folder) -> None:
    model, text = open_folder(folder.path), GreedyText.read(folder.path)
    text.check(model)
    other = (text.tokens[3] + 1) % VOCABULARY
    wrong = text._replace(tokens=(*text.tokens[:3], other, *text.tokens[4:]))
    with pytest.raises(StageFailed, match=f"as token 4 of the text .* expected {other}"):
        wrong.check(model)
    wrong._replace(limit=1).check(model)  # as if all tokens were near ties


@needs_genai
@pytest.mark.parametrize("seed", [None, 5])
def test_both_ways_to_generate_choose_alike(folder, seed) -> None:
    model, text = open_folder(folder.path), GreedyText.read(folder.path)
    prompt, count = text.prompt, len(text.tokens)
    likeliest = [*next_tokens(model, prompt, count)]
    assert likeliest == [*text.tokens][: len(likeliest)]
    generate = next_tokens_unlocked if seed is None else next_tokens
    for sampling in (Sampling(0, 1, seed), Sampling(2, 1e-6, seed)):
        assert [*generate(model, prompt, count, sampling)] == likeliest
    scores = next_scores(model, prompt)
    rare = {int(i) for i in scores.argsort()[:-60]}
    # None where the first token ends the text.
    seen = {next(generate(model, prompt, 1, Sampling(2, 1, s)), None) for s in range(200)}
    assert seen & rare, "no limit to the 50 likeliest"


@needs_genai
def test_a_seed_chooses_the_same_tokens(folder) -> None:
    model, prompt = open_folder(folder.path), GreedyText.read(folder.path).prompt
    texts = [
        tuple(next_tokens(model, prompt, 20, Sampling(2, 1, seed)))
        for seed in (1, 1, 1 + 2**31, -1, 2)
    ]
    assert texts[0] == texts[1] == texts[2]
    assert len({*texts}) == 3


@needs_genai
def test_speed_is_measured(llama, folder, tmp_path) -> None:
    context = context_for(llama, tmp_path / "any")
    sizes = {"prompt_tokens": 8, "tokens": 8}
    assert MinTokensPerSecond(at=1e-3, **sizes).evaluate(llama, folder, context).passed
    assert MaxFirstToken(ms=1e6, **sizes).evaluate(llama, folder, context).passed
    assert not MaxFirstToken(ms=1e-6, **sizes).evaluate(llama, folder, context).passed


@pytest.mark.skipif(not GENAI.missing(), reason="onnxruntime-genai is installed")
def test_without_genai_it_is_named(folder, llama, tmp_path) -> None:
    assert folder.manifest.facts["opened_by"] is None
    run = CliRunner().invoke(app, ["generate", str(folder.path), "a"])
    assert "pip install -e '.[genai]'" in run.output + run.stderr
    verdict = MinTokensPerSecond(at=1)
    with pytest.raises(compress.Unavailable, match="genai"):
        verdict.evaluate(llama, folder, context_for(llama, tmp_path / "any"))
