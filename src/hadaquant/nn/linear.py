"""RotatedLinear: nn.Linear with rotated low-bit weights and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hadaquant.contract import Contract, check_activations
from hadaquant.errors import FrontEndError, GlobalScaleError, LayerError, MismatchError, ShapeError
from hadaquant.formats import Format, get_format
from hadaquant.front import FrontEnd, given
from hadaquant.nn.lazy_weight import LazyWeight
from hadaquant.nn.sharing import InputGroup, Quantized
from hadaquant.ops import LinearPlan, explain, quantize
from hadaquant.ops.checks import FLOAT_DTYPES, check_global_number, check_global_scale, check_product, check_tensor
from hadaquant.ops.direct import direct_linear, unwatched
from hadaquant.ops.library import op
from hadaquant.ops.options import check_backend, scale_layout_for
from hadaquant.ops.target import target_of
from hadaquant.ops.weight_only import reads_by_nibble
from hadaquant.rotation import Rotation, parse, trusted
from hadaquant.tensor import QuantizedTensor


class RotatedLinear(nn.Module):
    """y = x · Wᵀ + bias with W·R quantized offline and x·R quantized, or rounded to 16 bits, in each call.

    Parameters without grad, so that whatever moves parameters moves them: ``codes``, ``scales``,
    ``global_scale`` (nvfp4), ``input_global_scale`` (nvfp4, when static), ``signs`` or ``matrix`` of
    the rotation, ``bias``. A dtype cast reaches the bias alone. The buffer ``contract`` says what the
    codes mean; loading a state_dict of another format, rotation, shape or kind of activations is refused.

    Args:
        in_features, out_features: K and N.
        format, rotation: as in :func:`hadaquant.quantize`.
        bias: whether there is one.
        input_global_scale: static nvfp4 multiplier of the inputs; None computes it in each call.
        activations: ``coded`` in the weight's format, or ``full``: rotated and rounded to bfloat16.
        backend: one of ``hadaquant.ops.options.BACKENDS``.
        device, dtype: of the empty parameters; ``dtype`` is the bias's and the nominal weight's.
    """

    codes: nn.Parameter
    scales: nn.Parameter
    global_scale: nn.Parameter | None
    input_global_scale: nn.Parameter | None
    signs: nn.Parameter | None
    matrix: nn.Parameter | None
    bias: nn.Parameter | None
    nominal: Tensor
    contract: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        format: str | Format,
        rotation: str | Rotation = "none",
        *,
        bias: bool = True,
        input_global_scale: float | None = None,
        activations: str = "coded",
        backend: str = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.format, r = get_format(format), parse(rotation)
        self.rotation_spec, self.activations = r.spec, check_activations(activations)
        self.backend = check_backend(backend)
        self.input_group: InputGroup | None = None
        self.input_member = 0
        check_product(self.format, 0, out_features, in_features)
        r.check_k(in_features)
        shape = (out_features, in_features)

        def empty(dims: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(dims, dtype=dtype, device=device), requires_grad=False)

        def fixed(t: Tensor | None) -> nn.Parameter | None:
            return None if t is None else nn.Parameter(t.to(device) if device else t, requires_grad=False)

        f = self.format
        self.register_parameter("codes", empty(f.codes_shape(shape), f.element.codes_dtype))
        self.register_parameter("scales", empty(f.scales_shape(shape), f.scale.dtype))
        self.register_parameter("global_scale", empty((), torch.float32) if f.has_global_scale else None)
        self.register_parameter("signs", fixed(r.signs))
        self.register_parameter("matrix", fixed(r.matrix))
        static = None
        if input_global_scale is not None:
            if activations == "full":
                fix = "leave input_global_scale out"
                raise GlobalScaleError(value=input_global_scale, rule="full activations are not scaled", fix=fix)
            check_global_number(input_global_scale)
            static = torch.tensor(input_global_scale, dtype=torch.float32, device=device)
            check_global_scale(f, static)
        self.register_parameter("input_global_scale", fixed(static))
        nominal = torch.empty(0, dtype=dtype or torch.get_default_dtype(), device=device)
        self.register_parameter("bias", empty((out_features,), nominal.dtype) if bias else None)
        # follows .half() and .to(device), so that the layer knows the dtype its weight would have
        self.register_buffer("nominal", nominal, persistent=False)
        self.register_buffer("contract", Contract.of(f, r, shape, activations).to_tensor().to(nominal.device))

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        format: str | Format,
        rotation: str | Rotation = "none",
        *,
        input_global_scale: float | None = None,
        activations: str = "coded",
        backend: str = "auto",
    ) -> RotatedLinear:
        """A RotatedLinear of a linear's weight and bias. The linear is left as it is.

        Raises:
            LayerError: not an nn.Linear with a plain floating weight.
            BlockError, GroupError: the format or rotation does not divide in_features.
        """
        reason = why_not(linear)
        if reason is not None:
            raise LayerError(layer=type(linear).__name__, rule=reason, fix="give an nn.Linear with a floating weight")
        weight = linear.weight.detach()
        layer = cls(
            linear.in_features,
            linear.out_features,
            format,
            rotation,
            bias=linear.bias is not None,
            input_global_scale=input_global_scale,
            activations=activations,
            backend=backend,
            device=weight.device,
            dtype=weight.dtype,
        )
        layer.set_weight(weight)
        if layer.bias is not None and linear.bias is not None:
            layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        return layer.train(linear.training)

    # ---- weight ---------------------------------------------------------------------------------

    def set_weight(self, weight: Tensor | QuantizedTensor) -> None:
        """Quantize a weight [N, K] in the original basis, keeping format, group and rotation.

        A weight that is quantized already, with better codes than the nearest, must have them too.

        Raises:
            ShapeError: another shape.
            MismatchError: quantized in another format, rotation or scale layout.
        """
        expected = (self.out_features, self.in_features)
        if tuple(weight.shape) != expected:
            raise ShapeError(what="weight", found=tuple(weight.shape), expected=expected, fix="give W as nn.Linear has")
        q = self._checked(weight) if isinstance(weight, QuantizedTensor) else self._quantized(weight.detach())
        with torch.no_grad():
            for mine, new in ((self.codes, q.codes), (self.scales, q.scales), (self.global_scale, q.global_scale)):
                if mine is not None and new is not None:
                    mine.copy_(new)

    def _quantized(self, weight: Tensor) -> QuantizedTensor:
        if weight.dtype not in FLOAT_DTYPES:
            weight = weight.to(torch.float32)
        return quantize(weight, self.format, rotation=self.rotation, backend=self.backend)

    def _checked(self, weight: QuantizedTensor) -> QuantizedTensor:
        for what, found, needed in (
            ("the weight's format", weight.format, self.format),
            ("the weight's rotation", weight.rotation.to(self.codes.device), self.rotation),
            ("the weight's scale_layout", weight.scale_layout, "linear"),
        ):
            if found != needed:
                raise MismatchError(what=what, found=found, expected=needed)
        return weight

    def quantized_weight(self) -> QuantizedTensor:
        """Codes and scales of W·R as a :class:`QuantizedTensor` on this layer's parameters."""
        return QuantizedTensor(self.codes, self.scales, self.global_scale, self.format, self.rotation)

    def dequantized_weight(self) -> Tensor:
        """float32 [N, K] in the original basis: what ``weight`` has become."""
        return torch.ops.hadaquant.dequantize(
            self.codes,
            self.scales,
            self.global_scale,
            self.format.name,
            self.rotation_spec,
            self.signs,
            self.matrix,
            "linear",
        )

    @property
    def weight(self) -> Tensor:
        """Reads as the dequantized weight in the layer's nominal dtype.

        Shape, dtype and device cost nothing, which is all that most code asks of a weight; any
        operation on it dequantizes. It cannot be written: see :meth:`set_weight`.
        """
        return LazyWeight(self)

    @property
    def rotation(self) -> Rotation:
        """The rotation, its tensors being this layer's parameters."""
        return trusted(self.rotation_spec, self.signs, self.matrix)

    # ---- forward --------------------------------------------------------------------------------

    def forward(self, x: Tensor, front_end: FrontEnd | None = None) -> Tensor:
        """[..., K] -> [..., N] in x's dtype, or autocast's.

        Gradients reach x and a trained bias as if the layer were x · Ŵᵀ + bias, Ŵ the dequantized weight.
        With a front end the layer is that of its result; there only the bias has a gradient.

        Raises:
            ShapeError, DtypeError: x is not a dense [..., K] of bfloat16, float16 or float32.
            FrontEndError: a front end where x or its tensors need a gradient.
        """
        check_tensor(x)
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ShapeError(
                what="x", found=tuple(x.shape), expected=f"[..., {self.in_features}]", fix="as nn.Linear needs it"
            )
        dtype, fe = x.dtype, given(front_end)
        if dtype in FLOAT_DTYPES and not x.is_meta and torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x = x if front_end is not None else x.to(dtype)  # a front end works in float32 on what it is given
        if torch.is_grad_enabled():
            if front_end is not None and (x.requires_grad or fe.has_gradient):
                raise FrontEndError(
                    value=repr(fe.kind),
                    rule="it has no gradient, and its input or one of its tensors needs one",
                    fix="call it under torch.no_grad(), or apply the op before the layer",
                )
            if x.requires_grad or (self.bias is not None and self.bias.requires_grad):
                return _StraightThrough.apply(x, self.bias, self, fe, dtype)
        return self._product(x, fe, dtype)

    def _product(self, x: Tensor, front_end: FrontEnd, dtype: torch.dtype) -> Tensor:
        group = None if torch.compiler.is_compiling() else self.input_group
        if group is None and unwatched(x):
            how = (self.format.name, self.rotation_spec, self.backend, dtype, self.activations == "full")
            y = direct_linear(x, front_end, self._parameters, *how)
            if y is not None:
                return y
        w = (self.codes, self.scales, self.global_scale)
        how = (self.bias, self.format.name, dtype, self.backend)
        if self.activations == "full":
            # others of a group may read it in another order
            by_nibble = group is None and reads_by_nibble(x, self.out_features, self.format, dtype, self.backend)
            if group is None:
                h = self._rotate_input(x, front_end, by_nibble)
            else:
                h, _, _ = group.quantize(self.input_member, x, front_end, self._quantize_input)
            return op("weight_mm", h)(h, *w, *how, by_nibble)
        if group is None:
            codes, scales, g = self._quantize_input(x, front_end)
        else:
            codes, scales, g = group.quantize(self.input_member, x, front_end, self._quantize_input)
        return op("scaled_mm", codes)(codes, scales, g, *w, *how, scale_layout_for(self.format, self.backend))

    def _quantize_input(self, x: Tensor, front_end: FrontEnd) -> Quantized:
        if self.activations == "full":
            return self._rotate_input(x, front_end, False), None, None
        rotation = (self.rotation_spec, self.signs, self.matrix)
        front = (front_end.spec, front_end.factor, front_end.shift)
        g = self.input_global_scale
        if g is None and self.format.has_global_scale:
            g = op("global_scale", x)(op("amax", x)(x, *rotation, self.backend, *front))
        order = scale_layout_for(self.format, self.backend)
        codes, scales = op("quantize", x)(x, self.format.name, *rotation, g, order, self.backend, *front)
        return codes, scales, g

    def _rotate_input(self, x: Tensor, front_end: FrontEnd, by_nibble: bool) -> Tensor:
        rotation = (self.rotation_spec, self.signs, self.matrix)
        front = (front_end.spec, front_end.factor, front_end.shift)
        return op("rotate_round", x)(x, *rotation, self.backend, *front, by_nibble)

    def explain(self, M: int = 1) -> LinearPlan:
        """Which kernels run for an input of M rows on this layer's device, and why."""
        n, k, target = self.out_features, self.in_features, target_of(self.codes.device)
        how = {"activations": self.activations, "backend": self.backend}
        return explain(self.format, M, n, k, target, rotation=self.rotation, **how)

    # ---- nn.Module ------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotatedLinear:
        # A cast to another float dtype must not reach float32 scales. Casts leave integers alone, so
        # fn sees their bits as int32: moves happen, casts do not.
        kept = {id(p) for name, p in self._parameters.items() if name != "bias" and p is not None}

        def keep_bits(t: Tensor) -> Tensor:
            if id(t) in kept and t.dtype == torch.float32:
                return fn(t.detach().view(torch.int32)).view(torch.float32)
            return fn(t)

        return super()._apply(keep_bits, recurse)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._check_stored(state_dict, prefix)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _check_stored(self, state_dict: dict[str, Any], prefix: str) -> None:
        name = prefix.removesuffix(".") or type(self).__name__
        stored = {
            key: state_dict[prefix + key] for key in (*self._parameters, "contract") if prefix + key in state_dict
        }
        if "contract" in stored:
            mine = Contract.of(self.format, self.rotation, (self.out_features, self.in_features), self.activations)
            mine.check_same(Contract.from_tensor(stored["contract"], name), name)
        elif "codes" in stored:
            rule = "its codes come without the contract that says what they mean"
            raise LayerError(layer=name, rule=rule, fix="store the whole state_dict of the layer")
        for key, tensor in stored.items():
            mine = self._parameters.get(key)
            if key != "bias" and mine is not None and tensor.dtype != mine.dtype:
                rule = f"{key} is stored as {tensor.dtype}, not {mine.dtype}"
                raise LayerError(layer=name, rule=rule, fix="store the state_dict without casting it")
            if key.endswith("global_scale") and not tensor.is_meta and not 0.0 < tensor.item() < float("inf"):
                rule = f"{key} is {tensor.item()}, not a positive finite number"
                raise LayerError(layer=name, rule=rule, fix="the file is damaged; quantize the layer again")

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, "
            f"format={self.format}, rotation={self.rotation}"
            + (", activations=full" if self.activations == "full" else "")
        )


class _StraightThrough(torch.autograd.Function):
    """Gradients of x · Ŵᵀ + bias, Ŵ the dequantized weight: the rounding of x counts as the identity."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, layer: RotatedLinear, front_end: FrontEnd, dtype: torch.dtype
    ) -> Tensor:
        ctx.layer, ctx.dtypes = layer, (x.dtype, None if bias is None else bias.dtype)
        return layer._product(x, front_end, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        gradient = gradients[0].to(torch.float32)
        x = (gradient @ ctx.layer.dequantized_weight()).to(ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        bias = gradient.flatten(0, -2).sum(0).to(ctx.dtypes[1]) if ctx.needs_input_grad[1] else None
        return x, bias, None, None, None


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot become a RotatedLinear, or None if it can."""
    if isinstance(module, RotatedLinear):
        return "it is quantized already"
    if not isinstance(module, nn.Linear):
        return f"{type(module).__name__} is not an nn.Linear"
    if hasattr(module, "weight_g"):
        return "its weight is computed by weight_norm"
    if parametrize.is_parametrized(module) or not isinstance(getattr(module, "weight", None), nn.Parameter):
        return "its weight is computed by a parametrization"
    if not module.weight.is_floating_point():
        return f"its weight has dtype {module.weight.dtype}"
    return None
