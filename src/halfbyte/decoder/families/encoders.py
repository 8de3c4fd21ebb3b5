"""Encoder families: where transformers' layers have their parts, and what is around the layers.

One entry of ENCODERS describes a family completely; `integrations/transformers/encoder/encoding.py` builds a `LayerSpec` from it and a live
layer. A layer computes

    h = norm(x + o_proj(attention(qkv(x))));  y = norm(h + down(gelu(up(h))))              BERT: norms of the sums
    h = x + o_proj(attention(qkv(norm(x))));  y = h + down(gelu(up(norm(h))))              ViT, Whisper: `pre_norm`

with attention to all tokens and the exact GELU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Stack = Literal["layers", "layers_with_position_bias", "image", "spectrogram"]


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """The parts of an encoder layer, by their names within it, and the variant that it computes.

    Attributes:
        layer_class: Class of the layers in transformers.models.
        stack_class: Class of the module that calls all layers.
        stack: What this module computes around its layers: "layers": nothing; "layers_with_position_bias": the bias of scores, which all
            layers have in common (MPNet); "image": embeddings of patches before them, a norm and a pooler after them; "spectrogram":
            convolutions before them, a norm after them.
        attention: The module that has `qkv` and, as an attribute, the number of heads.
        qkv: Names within `attention` of the projections of queries, keys and values.
        o_proj, up, activation, down: The other linear layers, and the activation function between the last two.
        norms: The norms of attention and of the MLP.
        heads: Attribute of `attention` with the number of heads.
        pre_norm: Whether norms precede the linear layers, as in ViT.
        position_bias: Whether a bias is added to scores.
    """

    layer_class: str
    stack_class: str
    stack: Stack
    attention: str
    qkv: tuple[str, str, str]
    o_proj: str
    up: str
    activation: str
    down: str
    norms: tuple[str, str]
    heads: str = "num_attention_heads"
    pre_norm: bool = False
    position_bias: bool = False


_BERT = EncoderFamily(
    layer_class="bert.modeling_bert.BertLayer",
    stack_class="bert.modeling_bert.BertEncoder",
    stack="layers",
    attention="attention.self",
    qkv=("query", "key", "value"),
    o_proj="attention.output.dense",
    up="intermediate.dense",
    activation="intermediate.intermediate_act_fn",
    down="output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
)
_VIT = EncoderFamily(
    layer_class="vit.modeling_vit.ViTLayer",
    stack_class="vit.modeling_vit.ViTModel",
    stack="image",
    attention="attention",
    qkv=("q_proj", "k_proj", "v_proj"),
    o_proj="attention.o_proj",
    up="mlp.fc1",
    activation="mlp.activation_fn",
    down="mlp.fc2",
    norms=("layernorm_before", "layernorm_after"),
    pre_norm=True,
)


def _as(family: EncoderFamily, model: str, layer: str, stack: str) -> EncoderFamily:
    """The same parts in another model of transformers."""
    return replace(family, layer_class=f"{model}.modeling_{model}.{layer}", stack_class=f"{model}.modeling_{model}.{stack}")


_FAMILIES = (
    _BERT,
    _as(_BERT, "camembert", "CamembertLayer", "CamembertEncoder"),
    _as(_BERT, "electra", "ElectraLayer", "ElectraEncoder"),
    _as(_BERT, "roberta", "RobertaLayer", "RobertaEncoder"),
    _as(_BERT, "xlm_roberta", "XLMRobertaLayer", "XLMRobertaEncoder"),
    EncoderFamily(
        layer_class="distilbert.modeling_distilbert.TransformerBlock",
        stack_class="distilbert.modeling_distilbert.Transformer",
        stack="layers",
        attention="attention",
        qkv=("q_lin", "k_lin", "v_lin"),
        o_proj="attention.out_lin",
        up="ffn.lin1",
        activation="ffn.activation",
        down="ffn.lin2",
        norms=("sa_layer_norm", "output_layer_norm"),
        heads="n_heads",
    ),
    EncoderFamily(
        layer_class="mpnet.modeling_mpnet.MPNetLayer",
        stack_class="mpnet.modeling_mpnet.MPNetEncoder",
        stack="layers_with_position_bias",
        attention="attention.attn",
        qkv=("q", "k", "v"),
        o_proj="attention.attn.o",
        up="intermediate.dense",
        activation="intermediate.intermediate_act_fn",
        down="output.dense",
        norms=("attention.LayerNorm", "output.LayerNorm"),
        position_bias=True,
    ),
    _VIT,
    _as(_VIT, "deit", "DeiTLayer", "DeiTModel"),
    EncoderFamily(
        layer_class="whisper.modeling_whisper.WhisperEncoderLayer",
        stack_class="whisper.modeling_whisper.WhisperEncoder",
        stack="spectrogram",
        attention="self_attn",
        qkv=("q_proj", "k_proj", "v_proj"),
        o_proj="self_attn.out_proj",
        up="fc1",
        activation="activation_fn",
        down="fc2",
        norms=("self_attn_layer_norm", "final_layer_norm"),
        heads="num_heads",
        pre_norm=True,
    ),
)
ENCODERS = {family.layer_class: family for family in _FAMILIES}
ENCODER_STACKS = {family.stack_class: family for family in _FAMILIES}

TOKEN_TYPES = "token_type_embeddings"
_TABLES = "word_embeddings", TOKEN_TYPES, "position_embeddings"
# Modules before the layers, y = norm(sum of a row of each table), and their tables.
EMBEDDING_LAYERS = {
    "bert.modeling_bert.BertEmbeddings": _TABLES,
    "camembert.modeling_camembert.CamembertEmbeddings": _TABLES,
    "electra.modeling_electra.ElectraEmbeddings": _TABLES,
    "roberta.modeling_roberta.RobertaEmbeddings": _TABLES,
    "xlm_roberta.modeling_xlm_roberta.XLMRobertaEmbeddings": _TABLES,
    "distilbert.modeling_distilbert.Embeddings": _TABLES[::2],
    "mpnet.modeling_mpnet.MPNetEmbeddings": _TABLES[::2],
}
