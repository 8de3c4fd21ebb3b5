"""Residual blocks and attention of diffusers' UNets and VAEs on CPUs, without copies between memory formats.

A `ResnetBlock2D` becomes four native calls: GroupNorm with SiLU, which adds the time embedding, quantizes where the convolution behind it
has a scale for each image, and writes channels_last; and convolutions, of which the second one adds the residual. As its result is
channels_last, so are the images of the blocks behind it. A `Transformer2DModel` leaves its tokens as they lie, which is channels_last, and
its last convolution adds the residual. Attention processors call halfbyte's attention in place of torch's.

Modules keep their classes' names, parameters and places. What these forwards do not compute is computed by diffusers': in training, for
gradients, under torch.compile, on GPUs, with hooks within a block, or where one of its layers was replaced.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from halfbyte.nn.modules.conv import QuantConv2d
from halfbyte.nn.modules.quantized import QuantModule, has_hooks
from halfbyte.nn.report import REMARK
from halfbyte.nn.static.traced import TracedModules
from halfbyte.ops.conv.functions import module_window
from halfbyte.ops.conv.group_norm import normed_conv2d, supports
from halfbyte.ops.library import plain
from halfbyte.ops.transformer import attention

if TYPE_CHECKING:
    from halfbyte.kernels.problem import Window

_RESNET, _ATTENTION = "diffusers.models.resnet", "diffusers.models.attention_processor"
_TRANSFORMER = "diffusers.models.transformers.transformer_2d"


def fuse_blocks_(model: nn.Module) -> None:
    """Replace the forwards of residual blocks and the processors of attention in `model`, in place, where it is in evaluation."""
    for module in list(model.modules()):
        kind = type(module)
        if kind.__module__ == _RESNET and kind.__name__ == "ResnetBlock2D" and _is_plain_block(module):
            module.__class__ = _fused_class(_Block, kind)
            _prepare(cast(_Block, module))
            setattr(module, REMARK, "computed together: norms with their activations, the second convolution with the residual")
        if kind.__module__ == _TRANSFORMER and kind.__name__ == "Transformer2DModel" and type(module.proj_out) is QuantConv2d:
            module.__class__ = _fused_class(_Transformer, kind)
        if kind.__module__ == _ATTENTION and kind.__name__ == "Attention" and _is_quantized(module):
            processor = cast("Callable[[], object] | None", getattr(sys.modules[_ATTENTION], "AttnProcessor2_0", None))
            if type(module.processor) is processor:
                module.processor = _processor()


def _is_quantized(module: nn.Module) -> bool:
    return any(isinstance(child, QuantModule) for child in module.modules())


def _is_plain_block(block: nn.Module) -> bool:
    """Whether a ResnetBlock2D computes conv2(silu(norm2(conv1(silu(norm1(x))) + temb))) + shortcut(x) by quantized convolutions on a CPU."""
    parts = block._modules
    convolutions = [parts.get("conv1"), parts.get("conv2"), *([shortcut] if (shortcut := parts.get("conv_shortcut")) else [])]
    return (
        not block.training
        and "forward" not in vars(block)
        and not any(has_hooks(module) or "forward" in vars(module) for module in block.modules() if module is not block)
        and block.time_embedding_norm == "default"
        and block.upsample is None
        and block.downsample is None
        and type(parts.get("nonlinearity")) is nn.SiLU
        and all(type(parts.get(name)) is nn.GroupNorm for name in ("norm1", "norm2"))
        and all(type(conv) is QuantConv2d and conv.padding_mode == "zeros" and conv.packed.device.type == "cpu" for conv in convolutions)
    )


class _Block(nn.Module):
    """Mixed in before diffusers' ResnetBlock2D (the second base class) to replace its forward."""

    inner: TracedModules
    windows: dict[str, Window]

    norm1: nn.GroupNorm
    norm2: nn.GroupNorm
    conv1: QuantConv2d
    conv2: QuantConv2d
    conv_shortcut: QuantConv2d | None
    time_emb_proj: nn.Module | None
    nonlinearity: nn.Module
    skip_time_act: bool
    output_scale_factor: float

    def forward(self, input_tensor: Tensor, temb: Tensor | None, *args: object, **kwargs: object) -> Tensor:
        """input_tensor [B, C, H, W], temb [B, E] or None -> [B, Co, H, W], channels_last"""
        x = input_tensor
        if args or kwargs or not self._computes(x, temb):
            return cast(Tensor, super().forward(input_tensor, temb, *args, **kwargs))
        added = None
        if self.time_emb_proj is not None and temb is not None:
            added = self.time_emb_proj(temb if self.skip_time_act else self.nonlinearity(temb))
        y = self._convolved(x, self.norm1, "conv1")
        shortcut = x if self.conv_shortcut is None else self.conv_shortcut(x, channels_last=True)
        y = self._convolved(y, self.norm2, "conv2", added, shortcut)
        return y if self.output_scale_factor == 1 else y / self.output_scale_factor

    def _computes(self, x: Tensor, temb: Tensor | None) -> bool:
        if self.training or torch.compiler.is_compiling() or self.inner.in_training() or any(self.inner.hooks):
            return False
        if (temb is None) != (self.time_emb_proj is None) or not self.inner.unchanged() or self.conv1.packed.device.type != "cpu":
            return False
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.parameters()):
            return False
        return supports(x, self.norm1, temb) is None and supports(x[:, :1].expand(-1, self.conv1.out_channels, -1, -1), self.norm2) is None

    def _convolved(self, x: Tensor, norm: nn.GroupNorm, name: str, added: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
        conv: QuantConv2d = getattr(self, name)
        settings = {"compute": conv.compute, "activation": conv.activation}
        return normed_conv2d(x, norm, conv.packed, conv.bias, self.windows[name].numbers, added=added, residual=residual, **settings)

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("inner", "windows", REMARK)}
        return _fused_again, (type(self).__mro__[2], state)


def _prepare(block: _Block) -> None:
    block.inner = TracedModules.of(block)
    block.windows = {name: module_window(getattr(block, name)) for name in ("conv1", "conv2")}


def _fused_again(kind: type[nn.Module], state: dict[str, object]) -> nn.Module:
    block = kind.__new__(kind)
    block.__dict__.update(state)
    fuse_blocks_(block)
    return block


@functools.cache
def _fused_class(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})


class _Transformer(nn.Module):
    """Mixed in before diffusers' Transformer2DModel: its tokens become an image without a copy, to whose projection the residual is added."""

    proj_out: nn.Module
    use_linear_projection: bool

    def _get_output_for_continuous_inputs(
        self, hidden_states: Tensor, residual: Tensor, batch_size: int, height: int, width: int, inner_dim: int
    ) -> Tensor:
        """hidden_states [B, H * W, C], residual [B, Co, H, W] -> [B, Co, H, W], channels_last"""
        if self.use_linear_projection or type(self.proj_out) is not QuantConv2d:
            sizes = batch_size, height, width, inner_dim
            return cast(Tensor, super()._get_output_for_continuous_inputs(hidden_states, residual, *sizes))  # type: ignore[misc]
        image = hidden_states.reshape(batch_size, height, width, inner_dim).permute(0, 3, 1, 2)
        return cast(Tensor, self.proj_out(image, residual, channels_last=True))

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return _fused_again, (type(self).__mro__[2], self.__dict__)


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
        attn: nn.Module,
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
        query, key, value = (y.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for y in (attn.to_q(x), attn.to_k(context), attn.to_v(context)))
        if attention.supports(query, key, value, None):
            y = attention.attend(query, key, value, None, query.shape[-1] ** -0.5)
        else:
            y = functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        y = attn.to_out[1](attn.to_out[0](y.flatten(2)))
        if hidden_states.dim() == 4:
            y = y.transpose(-1, -2).reshape(hidden_states.shape)
        if attn.residual_connection:
            y = y + hidden_states
        return cast(Tensor, y if attn.rescale_output_factor == 1 else y / attn.rescale_output_factor)

    def __reduce__(self) -> tuple[object, ...]:
        return _processor, ()


def _attends(attn: nn.Module, x: Tensor) -> bool:
    """Whether attention is softmax(q kᵀ) v of plain tensors on a CPU, without norms of heads."""
    return x.is_cpu and plain(x) and attn.spatial_norm is None and attn.norm_q is None and attn.norm_k is None
