"""Find decoupled convolutions with a BatchNorm or an activation behind them, in any model, and fuse them in place."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from dcnet.fusing.following import (
    IDEMPOTENT,
    Following,
    activation_of,
    fused_class,
    is_fused_class,
    is_timm_norm,
    plain_class,
)
from dcnet.fusing.fused_code import rewritten_code
from dcnet.fusing.fusion import Fusion, Place
from dcnet.fusing.readers import END, Seen, look
from dcnet.fusing.rewritten import Rewritten, restore_, rewrite_
from dcnet.fusing.surroundings import other_arguments, settings_of, surroundings_of
from dcnet.layers.block import Block
from dcnet.layers.decoupled import Decoupled, decoupled_layers, own_forward
from dcnet.layers.post_ops import FUSED_NORMS
from dcnet.layers.types import ExampleInput, Model
from dcnet.ops import ONLY


@dataclass
class FuseReport:
    """What `fuse_` did.

    Attributes:
        fused: the modules whose work each convolution does now.
        left: the reasons why other convolutions do not.
        unseen: why nothing could be fused without an `example_input`; empty if that was not the reason.
    """

    fused: dict[str, list[str]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    unseen: str = ""

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} fused, {len(self.left)} left"]
        lines += [f"  {name}: with {', '.join(others)}" for name, others in self.fused.items()]
        return "\n".join(lines + [f"  {name}: {reason}" for name, reason in self.left.items()])


def fuse_(model: nn.Module, example_input: ExampleInput | None = None) -> FuseReport:
    """Let decoupled convolutions do the work of the BatchNorm or the activation behind them, in place.

    Nothing is moved: the modules behind a convolution stay, with their parameters and state-dict keys, and hand its
    result through. Fused are BatchNorm1d/2d/3d and timm's BatchNormAct2d, then ReLU, ReLU6, SiLU, GELU, Hardswish,
    LeakyReLU and PReLU (these two behind a BatchNorm only), where nothing else reads the intermediate results. Where
    torch.fx can record the code around them, and this code depends only on its module's children and settings, `fuse_`
    also fuses activations that it calls as functions (`F.relu`), and a residual addition behind a BatchNorm with the
    activation behind that. Results are the same, in fewer passes over memory.
    A module that is replaced or hooked later computes for itself again, and so does a convolution in code that has
    another flag, list or `forward` than then. `unfuse_` undoes everything.
    Modules keep their place, and `isinstance` gives the same answers, but their class changes, and so does its name
    (such as `FusedBottleneck`). Where code cannot be recorded, a convolution that is called by itself, without the
    modules behind it, returns the fused result: call `unfuse_` before you take such a model apart.

    Args:
        model: any module, such as a converted one of timm or torchvision.
        example_input: a tensor, a tuple of arguments, or a dict of named ones, to run the model on, in training and in
            evaluation mode, with buffers restored afterward; without one the model is traced by torch.fx, which not
            every model allows.

    Examples:
        >>> import dcnet
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> report = dcnet.decouple_(net, "tanh", fuse=False)
        >>> print(dcnet.fuse_(net))
        1 fused, 0 left
          0: with 1, 2
    """
    report = FuseReport()
    names = {name: layer for name, layer in decoupled_layers(model).items() if layer.fusion is None}
    places, counts = _places(model)
    inside = {name + ".conv" * bool(name) for name, module in model.named_modules() if isinstance(module, Block)}
    inside |= {"conv"} if isinstance(model, Block) else set()
    own = {name: why for name, layer in names.items() if (why := own_forward(layer))}
    wanted = {name: layer for name, layer in names.items() if name and name not in inside and name not in own}
    report.left |= {name: "part of a Block already" for name in names if name in inside}
    report.left |= own
    if "" in names:
        report.left[""] = "the model itself"
    if not wanted:
        return report
    before = settings_of(model)
    seen, why = look(model, example_input)
    if why:
        return FuseReport(left=report.left | dict.fromkeys(wanted, why), unseen=why)
    modules, after = dict(model.named_modules(remove_duplicate=False)), settings_of(model)
    traced: Seen | None = None
    for name in wanted:
        norm, activation, reason = _checked(seen.chains.get(name, []), modules, counts, seen.calls)
        followers = [one for one in (norm, activation) if one is not None]
        if not followers:
            report.left[name] = reason
            continue
        others = other_arguments([name, *followers], modules) if example_input is not None else ""
        if others and traced is None:
            traced, _ = look(model)
        if others and traced is not None and not _is_alike(seen.chains[name], traced.chains.get(name, [])):
            report.left[name] = f"the code around may be called with other arguments than in the example: {others}"
            continue
        crossed = tuple(modules[one] for one in crossed_by([name, *followers]))
        around = surroundings_of([name, *followers], modules, before, after)
        fusion = Fusion(name, places[name], places.get(norm or ""), places.get(activation or ""), crossed, around)
        for one in followers:
            _follow(modules[one], fusion)
        wanted[name].fusion = fusion
        report.fused[name] = followers
        if reason:
            report.fused[name][-1] += f" ({reason})"
    _let_functions_join(model, {name: layer for name, layer in wanted.items() if layer.fusion is None}, places)
    for name, module in list(model.named_modules()):
        prefix = f"{name}." * bool(name)
        for conv, joined in rewrite_(module).items():
            if prefix + conv not in wanted:  # it was fused by an earlier call
                continue
            if report.left.pop(prefix + conv, None) is not None:
                report.fused[prefix + conv] = []
            fused = report.fused[prefix + conv]
            texts = ["an addition"] * (joined.residual is not None)
            if joined.activation is not None:
                texts.append(joined.written if joined.written.endswith("()") else prefix + joined.written)
            fused += texts if "an addition" not in fused and texts != fused[-1:] else []
    return report


def _is_alike(ran: list[str], traced: list[str]) -> bool:
    """Tell whether torch.fx, which sees the code for any arguments, has found the same chain as the run."""
    here, there = ([one for one in chain if not one.startswith(END)] for chain in (ran, traced))
    return here == there


def _let_functions_join(model: nn.Module, layers: dict[str, Decoupled], places: dict[str, Place]) -> None:
    """Give an empty fusion to layers after which the code around them calls an activation as a function."""
    modules = dict(model.named_modules(remove_duplicate=False))
    around: dict[nn.Module, list[Decoupled]] = {}
    for name, layer in layers.items():
        holder = name
        while holder and (holder == name or isinstance(modules[holder], nn.Sequential | nn.ModuleList | nn.ModuleDict)):
            holder = holder.rpartition(".")[0]
        around.setdefault(modules[holder], []).append(layer)
        layer.fusion = Fusion(name, places[name], None)
    for module, inside in around.items():
        code = rewritten_code(module)
        for layer in inside:
            if code is None or layer not in code.convs:
                layer.fusion = None


def unfuse_(model: Model) -> Model:
    """Let every module compute for itself again, in place, after `fuse_`; return the model.

    Args:
        model: any model.

    Examples:
        >>> import dcnet
        >>> net = nn.Sequential(dcnet.DecoupledConv2d(3, 8, 3), nn.ReLU())
        >>> list(dcnet.fuse_(net).fused)
        ['0']
        >>> dcnet.unfuse_(net)[0].fusion is None
        True
    """
    for module in model.modules():
        if isinstance(module, Decoupled):
            module.fusion = None
        elif isinstance(module, Following):
            assert isinstance(module, nn.Module)
            module.fusions = []  # this is enough if a parametrization has derived a class from the fused one
            if is_fused_class(type(module)):
                del module.fusions
                module.__class__ = plain_class(module)
        if isinstance(module, Rewritten):
            restore_(module)
    return model


def crossed_by(names: list[str]) -> set[str]:
    """Return the names of the modules that contain some of these modules, but not all."""
    holders = [{name[:at] for at, sign in enumerate(name) if sign == "."} for name in names]
    return {one for some in holders for one in some if not all(one in others for others in holders)}


def _follow(module: nn.Module, fusion: Fusion) -> None:
    if isinstance(module, Following):
        module.fusions.append(fusion)
        return
    kind = fused_class(module)
    assert kind is not None
    module.__class__ = kind
    module.fusions = [fusion]  # type: ignore[assignment]


def _places(model: nn.Module) -> tuple[dict[str, Place], Counter[nn.Module]]:
    """Return where each module is registered, by its full name, and in how many places each module is."""
    places, counts = {}, Counter[nn.Module]()
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():
            if child is not None:
                places[f"{path}." * bool(path) + name] = Place(parent, name)
                counts[child] += 1
    return places, counts


def _checked(
    chain: list[str], modules: dict[str, nn.Module], counts: Counter[nn.Module], calls: Mapping[str, int]
) -> tuple[str | None, str | None, str]:
    """Return the BatchNorm and the activation of a chain that can be fused, and why not more.

    counts: the number of places of each module. calls: how often each is called, by name.
    """
    followers = [name for name in chain if not name.startswith(END) and type(modules[name]) is not nn.Identity]
    end = next((name[1:] for name in chain if name.startswith(END)), "")
    if not followers:
        return None, None, end or "nothing follows"
    norm = modules[followers[0]]
    if type(norm) not in FUSED_NORMS and not is_timm_norm(norm):
        found = activation_of(norm)
        if found is None:
            possible = "BatchNorm1d, 2d, 3d or an activation"
            return None, None, f"followed by {type(norm).__name__}; possible: {possible}"
        if found[0] not in ONLY:
            return None, None, f"followed by {type(norm).__name__}, which is fused behind a BatchNorm only"
        why = _why_not(norm, counts)
        if calls[followers[0]] > 1:  # it could not tell whether the result was changed before
            why = f"not with {type(norm).__name__}, which is called {calls[followers[0]]} times"
        return None, None if why else followers[0], why
    if counts[norm] > 1:
        return None, None, f"its {type(norm).__name__} stands in several places"
    if is_timm_norm(norm):
        if activation_of(norm._modules.get("act")) is None or type(norm._modules.get("drop")) is not nn.Identity:
            return None, None, "the activation inside its BatchNormAct2d cannot be fused"
        return followers[0], None, ""
    if len(followers) == 1:
        return followers[0], None, ""
    why = _why_not(modules[followers[1]], counts)
    return followers[0], None if why else followers[1], why


def _why_not(activation: nn.Module, counts: Counter[nn.Module]) -> str:
    """Return why an activation cannot be fused; nothing if it can."""
    found = activation_of(activation)
    if found is None or (fused_class(activation) is None and not isinstance(activation, Following)):
        return f"not with {type(activation).__name__}"
    # a module in several places may only skip its work if applying it twice changes nothing
    if found[0] not in IDEMPOTENT and counts[activation] > 1:
        return f"not with {type(activation).__name__}, which is shared"
    return ""
