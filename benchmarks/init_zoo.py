"""Runs `compress init`, `check` and `run` for what people have, and prints what passed.

    python benchmarks/init_zoo.py [NAME ...]

Each source is tiny and has random weights.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from compress.pipelines import Pipeline  # noqa: E402
from compress.pipelines.commands.check import check_pipeline  # noqa: E402
from compress.pipelines.commands.init import InitOptions, write_draft  # noqa: E402

SHOW = "SHOW" in os.environ
"""Whether the drafts are printed, too."""
NETS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def conv(a, b, stride=1):
    return nn.Sequential(nn.Conv2d(a, b, 3, stride, 1), nn.BatchNorm2d(b), nn.ReLU())

def cnn(classes=4):
    pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return nn.Sequential(conv(1, 16), conv(16, 32, 2), conv(32, 32), pool, nn.Linear(32, classes))

def mlp(outputs=1):
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                         nn.Linear(64, outputs))

class Lstm(nn.Module):
    def __init__(self, outputs=1):
        super().__init__()
        self.lstm, self.head = nn.LSTM(6, 32, batch_first=True), nn.Linear(32, outputs)

    def forward(self, steps):
        return self.head(self.lstm(steps)[0][:, -1])

class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.top, self.low = conv(1, 16), conv(16, 32, 2)
        self.up, self.end = nn.ConvTranspose2d(32, 16, 2, 2), conv(32, 16)
        self.head = nn.Conv2d(16, 3, 1)

    def forward(self, image):
        top = self.top(image)
        return self.head(self.end(torch.cat([top, self.up(self.low(top))], 1)))

def drawn(x, targets):
    return {name: TensorDataset(x[part], targets(x[part]))
            for name, part in (("train", slice(0, 192)), ("val", slice(192, None)))}

def noise(*shape):
    return torch.randn(256, *shape, generator=torch.Generator().manual_seed(0))

def images():
    x = noise(1, 12, 12)
    for i in range(4):
        x[i::4, 0, i // 2 * 6 : i // 2 * 6 + 6, i % 2 * 6 : i % 2 * 6 + 6] += 2
    quarters = lambda x: x.unfold(2, 6, 6).unfold(3, 6, 6).mean((1, 4, 5)).flatten(1)
    return drawn(x, lambda x: quarters(x).argmax(1))

def colour_images():
    x = images()
    return {n: TensorDataset(d.tensors[0].expand(-1, 3, -1, -1).repeat(1, 1, 4, 4), d.tensors[1])
            for n, d in x.items()}

def numbers():
    return drawn(noise(6), lambda x: x.sum(1, keepdim=True))

def several():
    return drawn(noise(6), lambda x: (x[:, :3] > 0).float())

def series():
    return drawn(noise(8, 6), lambda x: x.mean((1, 2))[:, None])

def masks():
    return drawn(noise(1, 16, 16), lambda x: (x[:, 0] > 0).long() + (x[:, 0] > 1).long())

def unlabelled():
    return {n: TensorDataset(d.tensors[0]) for n, d in numbers().items()}
"""
SCRIPT = NETS.partition("def mlp")[0].replace("def cnn", "def _cnn") + (
    "class Net(nn.Module):\n"
    "    def __init__(self, classes=4):\n"
    "        super().__init__()\n"
    "        self.body = _cnn(classes)\n"
    "    def forward(self, image):\n"
    "        return self.body(image)\n"
)
TEXT = (
    "hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, "
    "vocab_size=99, max_position_embeddings=64, pad_token_id=0"
)
BODY = TEXT.partition(", vocab")[0] + ", image_size=32"
FOLDERS = {
    "bert": f"BertForSequenceClassification(BertConfig({TEXT}, num_labels=3))",
    "bert-regression": f"BertForSequenceClassification(BertConfig({TEXT}, num_labels=1))",
    "bert-embedding": f"BertModel(BertConfig({TEXT}))",
    "distilbert": "DistilBertForSequenceClassification(DistilBertConfig(dim=32, n_layers=2, "
    "n_heads=2, hidden_dim=64, vocab_size=99, max_position_embeddings=64))",
    "roberta-ner": f"RobertaForTokenClassification(RobertaConfig({TEXT}, num_labels=5))",
    "bert-mlm": f"BertForMaskedLM(BertConfig({TEXT}))",
    "gpt2": "GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=99, "
    "n_positions=64))",
    "llama": f"LlamaForCausalLM(LlamaConfig({TEXT}))",
    "t5-encoder": "T5EncoderModel(T5Config(d_model=32, d_kv=16, d_ff=64, num_layers=2, "
    "num_heads=2, vocab_size=99))",
    "vit": f"ViTForImageClassification(ViTConfig({BODY}, patch_size=8))",
    "convnext": "ConvNextForImageClassification(ConvNextConfig(depths=[1, 1, 1, 1], "
    "hidden_sizes=[16, 16, 32, 32], image_size=64))",
    "resnet": "ResNetForImageClassification(ResNetConfig(embedding_size=16, "
    "hidden_sizes=[16, 32], depths=[1, 1], layer_type='basic'))",
    "segformer": "SegformerForSemanticSegmentation(SegformerConfig(depths=[1, 1, 1, 1], "
    "hidden_sizes=[16, 16, 32, 32], decoder_hidden_size=32, image_size=64, num_labels=3))",
    "wav2vec2": "Wav2Vec2ForSequenceClassification(Wav2Vec2Config(hidden_size=32, "
    "num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, conv_dim=(16, 16), "
    "conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2, "
    "num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2))",
}
SOURCES = {
    **{name: InitOptions(name) for name in FOLDERS},
    "cnn": InitOptions("nets:cnn", data="nets:images"),
    "cnn-alone": InitOptions("nets:cnn", inputs=["image=batch,1,12,12"]),
    "cnn-checkpoint": InitOptions("nets:cnn", data="nets:images", checkpoint="cnn.pt"),
    "mlp-regressor": InitOptions("nets:mlp", data="nets:numbers"),
    "mlp-alone": InitOptions("nets:mlp", inputs=["x=batch,6"]),
    "mlp-unlabelled": InitOptions("nets:mlp", data="nets:unlabelled", task="regression"),
    "multilabel": InitOptions("nets:mlp", data="nets:several", arguments=["outputs=3"]),
    "lstm-regressor": InitOptions("nets:Lstm", data="nets:series"),
    "u-net": InitOptions("nets:UNet", data="nets:masks"),
    "script": InitOptions("net.py", data="nets:images"),
    "timm-resnet": InitOptions("timm:resnet10t", arguments=["in_chans=3"]),
    "timm-vit": InitOptions("timm:vit_tiny_patch16_224", arguments=["depth=2"]),
    "timm-data": InitOptions(
        "timm:resnet10t", arguments=["num_classes=4"], data="nets:colour_images"
    ),
    "onnx": InitOptions("cnn.onnx"),
    "pt2": InitOptions("cnn.pt2"),
    "torchscript": InitOptions("cnn.ts", inputs=["image=batch,1,12,12"]),
}
MAKE = """
import sys, torch
sys.path.insert(0, ".")
import nets
torch.manual_seed(0)
net, x = nets.cnn().eval(), torch.zeros(2, 1, 12, 12)
torch.save(net.state_dict(), "cnn.pt")
torch.jit.trace(net, x).save("cnn.ts")
shapes = ({0: torch.export.Dim("batch")},)
program = torch.export.export(net, (x,), dynamic_shapes=shapes)
torch.export.save(program, "cnn.pt2")
torch.onnx.export(net, (x,), "cnn.onnx", dynamo=True, dynamic_shapes=shapes, verbose=False)
"""


class Names(dict[str, Any]):
    """The names of transformers, which it imports when they are first read."""

    def __missing__(self, name: str) -> Any:
        import transformers

        return getattr(transformers, name)


def main(names: list[str]) -> None:
    """Print a line for each source, and the shares that passed."""
    passed = {"init": 0, "check": 0, "run": 0}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("nets.py").write_text(NETS)
        Path("net.py").write_text(SCRIPT)
        exec(MAKE)
        for name in names:
            file, options = Path(f"{name}.yaml"), SOURCES[name]
            if name in FOLDERS:
                eval(FOLDERS[name], Names()).save_pretrained(name)
            try:
                step = "init"
                write_draft(file, options)
                passed[step] += 1
                step = "check"
                check_pipeline(file, models=True)
                passed[step] += 1
                step = "run"
                Pipeline.from_yaml(file).run(Path("runs") / name)
                passed[step] += 1
                print(f"{name}: passed", flush=True)
            except Exception as error:  # noqa: BLE001  # whatever it is, it is a failure
                print(f"{name}: {step}: {type(error).__name__}: {error}", flush=True)
            if SHOW and file.exists():
                print(file.read_text(), flush=True)
    for step, count in passed.items():
        print(f"{step}: {count} of {len(names)} ({count / len(names):.0%})")


if __name__ == "__main__":
    main(sys.argv[1:] or [*SOURCES])
