"""Factories of the fetched architectures, for `model.factory`; weights come by `checkpoint`."""

import ast
import importlib
import sys
from pathlib import Path

import torch
from torch import nn

BENCHMARKS = Path(__file__).parents[1]


def efficientnet(packages: str, name: str) -> nn.Module:
    """Return an EfficientNet-Lite for images of `efficientnet_size`."""
    package = _import(packages, "efficientnet_lite_pytorch")
    return package.EfficientNet.from_name(name)


def detector(packages: str, name: str) -> nn.Module:
    """Return a network of MTCNN: PNet, RNet or ONet, which give boxes and probabilities."""
    # The package itself imports torchvision; its three networks need torch alone.
    file = Path(packages, "facenet_pytorch", "models", "mtcnn.py")
    return _class_of(file, name, {"torch": torch, "nn": nn})(pretrained=False)


class SpeakerEncoder(nn.Module):
    """Resemblyzer's encoder of mel spectrograms."""

    def __init__(self) -> None:
        super().__init__()
        # As in Resemblyzer 0.1.4, whose module imports packages for sound.
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)
        self.relu = nn.ReLU()

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = self.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def sentence_encoder(config: str) -> nn.Module:
    """Return a BERT whose tokens' mean, of length 1, stands for the sentence."""
    from transformers import BertConfig

    sys.path.insert(0, str(BENCHMARKS / "pruner"))
    from sentences import Encoder

    return Encoder(BertConfig.from_pretrained(config))


def bert_base() -> nn.Module:
    """Return a BERT-base of seeded weights, whose embedding of a text is its first token's."""
    from transformers import BertConfig, BertModel

    class FirstToken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
            self.bert = BertModel(config, add_pooling_layer=False)

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.bert(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]

    torch.manual_seed(0)
    return FirstToken()


def vit_small() -> nn.Module:
    """Return a ViT-S/16 of seeded weights."""
    import timm

    torch.manual_seed(0)
    return timm.create_model("vit_small_patch16_224")


def resnet18() -> nn.Module:
    """Return a network of ResNet-18's shape, whose BatchNorms are those of seeded weights."""
    from shapes import resnet18

    torch.manual_seed(0)
    return resnet18()


def resnet50() -> nn.Module:
    """Return a network of ResNet-50's shape, whose BatchNorms are those of seeded weights."""
    from shapes import resnet50

    torch.manual_seed(0)
    return resnet50()


def efficientnet_size(name: str) -> int:
    """Return the side of the images that an EfficientNet-Lite was trained on."""
    return {"efficientnet-lite0": 224, "efficientnet-lite1": 240, "efficientnet-lite2": 260}[name]


def _import(packages: str, name: str):
    if packages not in sys.path:
        sys.path.append(packages)
    return importlib.import_module(name)


def _class_of(file: Path, name: str, names: dict):
    """Return a class of a module whose imports are not run."""
    tree = ast.parse(file.read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name]
    exec(compile(tree, file, "exec"), names)
    return names[name]
