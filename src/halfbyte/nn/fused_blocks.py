"""Residual blocks and attention of diffusers' UNets and VAEs, without copies between memory formats.

A `ResnetBlock2D` becomes one native call on a CPU, but for the time embedding and the shortcut: GroupNorm with SiLU, which adds the time
embedding, quantizes where the convolution behind it has a scale for each image, and writes channels_last; and convolutions, of which the
second one adds the residual. Its result is channels_last, as the images of the blocks behind it then are, and that of `conv_in` is. On GPUs
torch norms; torch.compile fuses that with the copy to channels_last. On CPUs a `Transformer2DModel` leaves its tokens as they lie, which is
channels_last; its norm and first convolution are one native call, and a `BasicTransformerBlock` is one (`fused_transformers.py`).
Attention processors call halfbyte's attention in place of torch's. The convolution of an `Upsample2D` reads the image before it is
enlarged.

Modules keep their classes' names, parameters and places. What these forwards do not compute is computed by diffusers': in training, for
gradients, on CPUs under torch.compile, with hooks within a block, or where one of its layers was replaced. The names of its classes and of
two methods of Transformer2DModel are private: with versions of diffusers that were not tested nothing is replaced, and a warning says so.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Protocol, TypeGuard, TypeVar, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.bounded import by_object
from halfbyte.nn.frozen import Frozen, while_unchanged
from halfbyte.nn.fused_transformers import compiled
from halfbyte.nn.modules.conv import QuantConv2d
from halfbyte.nn.modules.quantized import has_global_hooks, has_hooks
from halfbyte.nn.report import REMARK
from halfbyte.ops.conv.functions import window_numbers
from halfbyte.ops.conv.group_norm import NormedConv, NormedConvs
from halfbyte.ops.conv.upsampled import UpsampledConv
from halfbyte.ops.modes import plain
from halfbyte.ops.transformer import attention
from halfbyte.versions import why_untested

_RESNET, _ATTENTION = "diffusers.models.resnet", "diffusers.models.attention_processor"
_UPSAMPLING = "diffusers.models.upsampling"
_TRANSFORMER, _BLOCKS = "diffusers.models.transformers.transformer_2d", "diffusers.models.attention"
_LAYERS = "norm1", "conv1", "norm2", "conv2", "nonlinearity", "dropout"
_Kind = TypeVar("_Kind", bound=nn.Module)


def fuse_blocks_(model: nn.Module) -> None:
    """Replace the forwards of residual blocks and the processors of attention in `model`, in place."""
    homes = {type(module).__module__ for module in model.modules()}
    if homes.isdisjoint((_RESNET, _ATTENTION, _TRANSFORMER, _BLOCKS, _UPSAMPLING)) or why_untested("diffusers") is not None:
        return
    for module in list(model.modules()):
        kind = type(module)
        if kind.__module__ == _RESNET and kind.__name__ == "ResnetBlock2D" and not isinstance(module, _Block) and _is_plain(module):
            module.__class__ = _fused_class(_Block, kind)
            setattr(module, REMARK, "computed together: norms with their activations, the second convolution with the residual")
        if kind.__module__ == _TRANSFORMER and kind.__name__ == "Transformer2DModel" and not isinstance(module, _Transformer):
            module.__class__ = _fused_class(_Transformer, kind)
        if kind.__module__ == _BLOCKS and kind.__name__ == "BasicTransformerBlock" and not isinstance(module, _TransformerBlock):
            module.__class__ = _fused_class(_TransformerBlock, kind)
        if kind.__module__ == _UPSAMPLING and kind.__name__ == "Upsample2D" and not isinstance(module, _Upsample):
            module.__class__ = _fused_class(_Upsample, kind)
        first = module._modules.get("conv_in")
        if type(first) is QuantConv2d and kind.__module__.startswith("diffusers."):
            first.leaves_channels_last = True
        of_attention = kind.__module__ == _ATTENTION and kind.__name__ == "Attention"
        if of_attention and type(module.processor) is getattr(sys.modules[_ATTENTION], "AttnProcessor2_0", None):
            cast(_Attention, module).processor = _processor()


def _is_plain(block: nn.Module) -> bool:
    """Whether a ResnetBlock2D computes (shortcut(x) + conv2(silu(norm2(conv1(silu(norm1(x))) + temb)))) / output_scale_factor, and its
    convolutions are quantized."""
    resamples = any(getattr(block, name) is not None for name in ("upsample", "downsample"))
    quantized = all(type(block._modules.get(name)) is QuantConv2d for name in ("conv1", "conv2"))
    # "group": of VAEs, without an embedding.
    without = block._modules.get("time_emb_proj") is None
    plain_norm = block.time_embedding_norm == "default" or (block.time_embedding_norm == "group" and without)
    return quantized and plain_norm and not resamples and "forward" not in vars(block)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _is_norm_of(norm: nn.Module, conv: nn.Module, x: Tensor) -> bool:
    """Whether both are a GroupNorm and a convolution behind it, for the same channels, on the device of x."""
    if not _is_exactly(norm, nn.GroupNorm) or not _is_exactly(conv, QuantConv2d) or conv.padding_mode != "zeros":
        return False
    return norm.num_channels == conv.in_channels and conv.packed_data.device == x.device


def _is_exactly(module: nn.Module, kind: type[_Kind]) -> TypeGuard[_Kind]:
    """Whether a module computes as its class does: it is of no subclass, and has no hooks and no forward of its own."""
    return type(module) is kind and not has_hooks(module) and "forward" not in vars(module)


def _normed_conv(
    x: Tensor, norm: nn.GroupNorm, conv: QuantConv2d, *, added: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    y = norm(x if added is None else x + added[:, :, None, None])
    y = functional.silu(y).contiguous(memory_format=torch.channels_last)
    within = residual if residual is None or conv.is_residual(residual, y) else None
    y = cast(Tensor, conv(y, within, channels_last=True))
    return y if residual is None or within is not None else y + residual


def _native(*pairs: tuple[nn.Module, nn.Module], activated: bool) -> NormedConvs | None:
    """One native call of norms and the convolutions behind them, on a CPU; None where a layer is another."""
    stages = list[NormedConv]()
    for norm, conv in pairs:
        if not _is_exactly(norm, nn.GroupNorm) or norm.weight is None or norm.bias is None or not norm.weight.is_cpu:
            return None
        if not _is_exactly(conv, QuantConv2d) or not _is_norm_of(norm, conv, norm.weight):
            return None
        if stages and stages[-1].packed.sizes.out != norm.num_channels:
            return None
        numbers = window_numbers(conv.packed.sizes.kernel, conv.stride, conv.padding, conv.dilation)
        of_norm = norm.num_groups, norm.eps, norm.weight, norm.bias
        stages.append(NormedConv(*of_norm, conv.packed, conv.bias, numbers, conv.compute, conv.activation))
    return NormedConvs(stages, activated=activated)


@while_unchanged()
def _compiled_block(block: nn.Module) -> NormedConvs | None:
    """The native call of a ResnetBlock2D."""
    norm1, conv1, norm2, conv2, activation, dropout = (block.get_submodule(name) for name in _LAYERS)
    usual = _is_exactly(activation, nn.SiLU) and _is_exactly(dropout, nn.Dropout) and not dropout.training
    return _native((norm1, conv1), (norm2, conv2), activated=True) if usual else None


@by_object(lambda compiled, conv: compiled[2]() is conv and compiled[1].is_unchanged() and compiled[3].is_unchanged())
def _compiled_entry(norm: nn.Module, conv: nn.Module) -> tuple[NormedConvs | None, Frozen, ref[nn.Module], Frozen]:
    """The native call of a norm and the convolution behind it, and what it follows from."""
    return _native((norm, conv), activated=False), Frozen(norm), ref(conv), Frozen(conv)


class _Mixin(nn.Module):
    """The first base class of a class of diffusers with a forward of halfbyte's."""

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _blank, type(self).__bases__, self.__dict__


class _Block(_Mixin):
    """Mixed in before diffusers' ResnetBlock2D (the second base class) to replace its forward."""

    norm1: nn.GroupNorm
    norm2: nn.GroupNorm
    conv1: QuantConv2d
    conv2: QuantConv2d
    conv_shortcut: nn.Module | None
    time_emb_proj: nn.Module | None
    nonlinearity: nn.Module
    dropout: nn.Module
    skip_time_act: bool
    output_scale_factor: float

    def forward(self, input_tensor: Tensor, temb: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        """input_tensor [B, C, H, W], temb [B, E] or None -> [B, Co, H, W], channels_last"""
        x, y = input_tensor, None
        if not (args or kwargs or self.training or (temb is None) != (self.time_emb_proj is None) or has_global_hooks()):
            y = self._with_torch_norms(x, temb) if _on_gpu(x) else self._natively(x, temb)
        if y is None:
            return cast(Tensor, super().forward(x, temb, *args, **kwargs))
        return y if self.output_scale_factor == 1 else y / self.output_scale_factor

    def _natively(self, x: Tensor, temb: Tensor | None) -> Tensor | None:
        if not plain(x):
            return None
        convs = _compiled_block(self)
        if convs is None or not convs.fits(x, temb) or self._needs_gradients():
            return None
        return convs(x, self._embedded(temb), self._shortcut(x))

    def _with_torch_norms(self, x: Tensor, temb: Tensor | None) -> Tensor | None:
        pairs = (self.norm1, self.conv1), (self.norm2, self.conv2)
        if not all(_is_norm_of(*pair, x) for pair in pairs) or self.conv1.out_channels != self.norm2.num_channels:
            return None
        if not _is_exactly(self.nonlinearity, nn.SiLU) or not _is_exactly(self.dropout, nn.Dropout) or self.dropout.training:
            return None
        if self._needs_gradients():
            return None
        added, y = self._embedded(temb), _normed_conv(x, self.norm1, self.conv1)
        return _normed_conv(y, self.norm2, self.conv2, added=added, residual=self._shortcut(x))

    def _needs_gradients(self) -> bool:
        return torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters())

    def _embedded(self, temb: Tensor | None) -> Tensor | None:
        proj = self.time_emb_proj
        return None if proj is None or temb is None else cast(Tensor, proj(temb if self.skip_time_act else self.nonlinearity(temb)))

    def _shortcut(self, x: Tensor) -> Tensor:
        shortcut = self.conv_shortcut
        if shortcut is None:
            return x
        return cast(Tensor, shortcut(x, channels_last=True) if type(shortcut) is QuantConv2d else shortcut(x))


@while_unchanged()
def _compiled_upsample(block: nn.Module) -> UpsampledConv | None:
    """The native call of an Upsample2D's convolution."""
    conv = cast(nn.Module, block._modules.get("conv"))
    if _is_exactly(conv, QuantConv2d) and conv.padding_mode == "zeros" and conv.packed_data.is_cpu:
        numbers = window_numbers(conv.packed.sizes.kernel, conv.stride, conv.padding, conv.dilation)
        return UpsampledConv(conv.packed, conv.bias, numbers, conv.compute, conv.activation)
    return None


class _Upsample(_Mixin):
    """Mixed in before diffusers' Upsample2D: the convolution reads the small image, if it quantizes images with one scale each."""

    norm: nn.Module | None
    name: str
    use_conv: bool
    use_conv_transpose: bool
    interpolate: bool

    def forward(self, hidden_states: Tensor, output_size: int | None = None, *args: object, **kwargs: object) -> Tensor:
        """hidden_states [B, C, H, W] -> [B, Co, 2 H, 2 W], channels_last, or of `output_size`"""
        x, usual = hidden_states, self.use_conv and not self.use_conv_transpose and self.interpolate and self.norm is None
        if usual and self.name == "conv" and output_size is None and not (args or kwargs or has_global_hooks()) and plain(x):
            differentiable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *self.parameters()))
            native = None if differentiable else _compiled_upsample(self)
            if native is not None and (y := native(x)) is not None:
                return y
        return cast(Tensor, super().forward(x, output_size, *args, **kwargs))


class _Transformer(_Mixin):
    """Mixed in before diffusers' Transformer2DModel: images become tokens, and tokens images, without copies; the first convolution takes
    what the norm quantizes, and the last one adds the residual."""

    norm: nn.GroupNorm
    proj_in: QuantConv2d
    proj_out: QuantConv2d
    use_linear_projection: bool

    def _operate_on_continuous_inputs(self, hidden_states: Tensor) -> tuple[Tensor, int]:
        """hidden_states [B, C, H, W] -> [B, H * W, Ci] and Ci"""
        x, image = hidden_states, None
        if plain(x) and not has_global_hooks():
            convs = _compiled_entry(self.norm, self.proj_in)[0]
            image = convs(x) if convs is not None and convs.fits(x) else None
        if image is None:
            return cast("tuple[Tensor, int]", super()._operate_on_continuous_inputs(x))  # type: ignore[misc]
        return image.permute(0, 2, 3, 1).flatten(1, 2), image.shape[1]

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        """hidden_states [B, H * W, C], residual [B, Co, H, W] -> [B, Co, H, W], channels_last"""
        if self.use_linear_projection or not _is_exactly(self.proj_out, QuantConv2d) or has_global_hooks():
            sizes = batch_size, height, width, inner_dim
            return cast(Tensor, super()._get_output_for_continuous_inputs(hidden_states, residual, *sizes))  # type: ignore[misc]
        image = hidden_states.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)
        return cast(Tensor, self.proj_out(image, residual, channels_last=True))


class _TransformerBlock(_Mixin):
    """Mixed in before diffusers' BasicTransformerBlock: one native call without masks and arguments of attention."""

    @property
    def halfbyte_remark(self) -> str:
        """What `halfbyte.report` says of the block."""
        block = compiled(self)
        return f"left to diffusers: {block}" if isinstance(block, str) else "one native call"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, object] | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """hidden_states [B, T, K], encoder_hidden_states [B, S, E] -> [B, T, K]"""
        x, context = hidden_states, encoder_hidden_states
        given = attention_mask is None and encoder_attention_mask is None and not cross_attention_kwargs
        if given and context is not None and not (self._is_watched() or self._needs_gradients(x, context)):
            block = compiled(self)
            if not isinstance(block, str) and block.fits(x, context):
                return block(x, context)
        inputs = x, attention_mask, context, encoder_attention_mask, timestep, cross_attention_kwargs
        return cast(Tensor, super().forward(*inputs, *args, **kwargs))

    def _is_watched(self) -> bool:
        return torch.compiler.is_compiling() or self.training or has_global_hooks()

    def _needs_gradients(self, *inputs: Tensor) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *self.parameters()))


def _blank(mixin: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    """A module without its state, which copy and pickle add."""
    fused = _fused_class(mixin, kind)
    return fused.__new__(fused)


_CLASSES: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _fused_class(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    if (mixin, kind) not in _CLASSES:
        _CLASSES[mixin, kind] = type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})
    return _CLASSES[mixin, kind]


class _Attention(Protocol):
    """What a processor reads of diffusers' Attention."""

    processor: object
    spatial_norm: object
    norm_q: object
    norm_k: object
    group_norm: Callable[[Tensor], Tensor] | None
    norm_cross: object
    norm_encoder_hidden_states: Callable[[Tensor], Tensor]
    to_q: Callable[[Tensor], Tensor]
    to_k: Callable[[Tensor], Tensor]
    to_v: Callable[[Tensor], Tensor]
    to_out: Sequence[Callable[[Tensor], Tensor]]
    heads: int
    residual_connection: bool
    rescale_output_factor: float


def _processor() -> object:
    """A processor that attends by halfbyte's kernel."""
    return _processor_class()()


@functools.cache
def _processor_class() -> type:
    base = vars(sys.modules[_ATTENTION])["AttnProcessor2_0"]
    return type(base.__name__, (_Processor, base), {"__module__": base.__module__})


class _Processor:
    """Mixed in before diffusers' AttnProcessor2_0, which computes what this one does not."""

    def __call__(
        self,
        attn: _Attention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        *args: object,
        **kwargs: object,
    ) -> Tensor:
        """hidden_states [B, T, C] or [B, C, H, W], encoder_hidden_states [B, S, E] or None -> as hidden_states"""
        if attention_mask is not None or args or kwargs or not _attends(attn, hidden_states):
            inputs = attn, hidden_states, encoder_hidden_states, attention_mask, temb
            return cast(Tensor, super().__call__(*inputs, *args, **kwargs))  # type: ignore[misc]
        x = hidden_states.flatten(2).transpose(1, 2) if hidden_states.dim() == 4 else hidden_states
        if attn.group_norm is not None:
            x = attn.group_norm(x.transpose(1, 2)).transpose(1, 2)
        context = x if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            context = attn.norm_encoder_hidden_states(context)
        projected = attn.to_q(x), attn.to_k(context), attn.to_v(context)
        query, key, value = (y.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for y in projected)
        if attention.supports(query, key, value, None):
            y = attention.attend(query, key, value, None, query.shape[-1] ** -0.5)
        else:
            y = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        y = attn.to_out[1](attn.to_out[0](y.flatten(2)))
        if hidden_states.dim() == 4:
            y = y.transpose(-1, -2).reshape(hidden_states.shape)
        if attn.residual_connection:
            y = y + hidden_states
        return y if attn.rescale_output_factor == 1 else y / attn.rescale_output_factor

    def __reduce__(self) -> tuple[object, ...]:
        return _processor, ()


def _attends(attn: _Attention, x: Tensor) -> bool:
    """Whether attention is softmax(q kᵀ) v of plain tensors on a CPU, without norms of heads."""
    return x.is_cpu and plain(x) and attn.spatial_norm is None and attn.norm_q is None and attn.norm_k is None
