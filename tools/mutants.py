"""Plant known mistakes in a copy of the package, one at a time; the tests must catch every one.

    python tools/mutants.py [NAME ...] [--list]

A NAME is a part of a mutant's name or of its file: `ops/cpu` for all in there. A mutant that survives is a hole in the
suite. A mutation whose text is no longer in the source is an error too, so that this list keeps up with the code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: str  # the test files that should notice
    unchecked: bool = False  # skip the check of slopes at registration, which alone would stop it


MUTANTS = [
    Mutant(
        "couple_: kernels that other code reads",
        "converting/couple.py",
        "for name in sorted(changed & seen.read):",
        "for name in ():",
        "test_couple.py",
    ),
    Mutant(
        "calibration: kernels that other code reads",
        "converting/calibrate.py",
        "if observed.hooked or observed.kernels_read:",
        "if observed.hooked:",
        "test_calibrated_conversion.py",
    ),
    Mutant(
        "calibration: outputs that are given away",
        "converting/observe.py",
        "            if one.output in kept:",
        "            if False:",
        "test_calibrated_conversion.py",
    ),
    Mutant(
        "code that looks at a result",
        "fusing/running.py",
        "for leaf in tree_leaves(result)) or _asks_for_values(func)",
        "for leaf in tree_leaves(result))",
        "test_fuse.py",
    ),
    Mutant(
        "export: a norm over tokens",
        "deploy/prepare.py",
        "and output.readers == [norm] and batches[layer]:",
        "and output.readers == [norm]:",
        "test_export.py",
    ),
    Mutant(
        "surroundings: settings",
        "fusing/surroundings.py",
        "            if now is not value and not (",
        "            if False and not (",
        "test_fuse.py",
    ),
    Mutant(
        "surroundings: another forward",
        "fusing/surroundings.py",
        "return self.owner is None or self._runs_forward()",
        "return True",
        "test_fuse.py",
    ),
    Mutant(
        "surroundings: what code changes itself is a setting",
        "fusing/surroundings.py",
        "for name, value in after[one].items() if before[one].get(name) == value}",
        "for name, value in after[one].items()}",
        "test_fuse.py",
    ),
    Mutant(
        "surroundings: other arguments",
        "fusing/fuse.py",
        "if others and traced is not None and not _is_alike(",
        "if False and not _is_alike(",
        "test_fuse.py",
    ),
    Mutant(
        "functions that join: the slope of leaky_relu",
        "fusing/fused_code.py",
        'slope = options.pop("negative_slope", 0.01)',
        'slope = 0.01 * (options.pop("negative_slope", 0.01) > 0.0)',
        "test_fused_code.py",
    ),
    Mutant(
        "functions that join: copies",
        "fusing/rewritten.py",
        'return _restored, (plain_kind(self),), state | {"convolutions": empty}',
        "return _restored, (plain_kind(self),), state",
        "test_fused_code.py",
    ),
    Mutant(
        "functions that join: layers without one keep an empty fusion",
        "fusing/fuse.py",
        "            if code is None or layer not in code.convs:",
        "            if False:",
        "test_fused_code.py",
    ),
    Mutant(
        "results that the model keeps",
        "fusing/readers.py",
        "if current in kept and output is not current:",
        "if False:",
        "test_fuse.py",
    ),
    Mutant(
        "results that the model keeps, as torch.fx sees them",
        "fusing/readers.py",
        "if current in kept or len(users) != 1",
        "if len(users) != 1",
        "test_fuse.py",
    ),
    Mutant(
        "code that asks whether there is a gradient",
        "fusing/running.py",
        "if func in _ASKS_FOR_GRADIENTS:",
        "if False:",
        "test_fuse.py",
    ),
    Mutant(
        "averages move again in a checkpoint",
        "layers/post_ops.py",
        "if batches is not None and not torch.compiler.is_compiling() and recomputing():",
        "if False:",
        "test_fuse.py",
    ),
    Mutant(
        "an activation hands the same through twice",
        "fusing/fusion.py",
        "return (waits and self._is_result(x)) or",
        "return self._is_result(x) or",
        "test_fuse.py",
    ),
    Mutant(
        "Block: a norm over another dimension",
        "layers/post_ops.py",
        "return type(norm) is FUSED_NORMS[max(dims, 1) - 1] and x.dim() == dims + 2",
        "return type(norm) in FUSED_NORMS",
        "test_models.py",
    ),
    Mutant(
        "Block: hooks on the norm",
        "layers/block.py",
        "is_norm_of(norm, conv, x) and not hooked(norm):",
        "is_norm_of(norm, conv, x):",
        "test_models.py",
    ),
    Mutant(
        "a forward that was put on a layer",
        "layers/decoupled.py",
        'if "forward" in vars(layer) else ""',
        'if False else ""',
        "test_couple.py test_models.py",
    ),
    Mutant(
        "calibration: kernels of layers that stay plain",
        "converting/calibrate.py",
        "return usual and owners[layer.weight] == 1",
        "return usual",
        "test_calibrated_conversion.py",
    ),
    Mutant(
        "calibration: norms of tokens",
        "converting/observe.py",
        "if _channel_dimension(layer, y) != 1:",
        "if False:",
        "test_calibrated_conversion.py",
    ),
    Mutant(
        "calibration: hooks on a layer",
        "converting/observe.py",
        "Observed(hooked=hooked(layer))",
        "Observed()",
        "test_calibrated_conversion.py",
    ),
    Mutant(
        "layers that are called by keyword",
        "fusing/fused_code.py",
        "graph.call_function(run_fused, (layer, conv.all_input_nodes[0], None, False, *more))",
        "graph.call_function(run_fused, (layer, conv.args[0], None, False, *more))",
        "test_fused_code.py",
    ),
    Mutant(
        "checkpoints: what follows is done again",
        "fusing/fusion.py",
        "return conv is not None and self.fuses(conv)",
        "return False",
        "test_fuse.py",
    ),
    Mutant(
        "checkpoints: a convolution inside counts as outside",
        "fusing/fusion.py",
        "if backward_pass() in (-1, self.waiting.backward):",
        "if backward_pass() == -1:",
        "test_fuse.py test_chain.py",
    ),
    Mutant(
        "copies: a convolution takes its fusion along",
        "layers/decoupled.py",
        'for name, value in vars(self).items() if name != "fusion"}',
        "for name, value in vars(self).items()}",
        "test_fuse.py",
    ),
    Mutant(
        "copies: parts of them are fused",
        "fusing/fusion.py",
        "within.fused_code is not None or within.code_is_due",
        "within.fused_code is not None",
        "test_fuse.py",
    ),
    Mutant(
        "an activation that gets something else",
        "fusing/fusion.py",
        "if waits and not shared:",
        "if waits and self.norm is None:",
        "test_fuse.py",
    ),
    Mutant(
        "couple_: kernels that others need",
        "converting/couple.py",
        "if not all(one in kernels and torch.equal(kernels[one], kernel) for one in others):",
        "if False:",
        "test_couple.py",
    ),
    Mutant(
        "couple_: a forward of its own",
        "converting/couple.py",
        "    if why := own_forward(layer):",
        "    if why := False:",
        "test_couple.py",
    ),
    Mutant(
        "a record without weights is trained again",
        "training/folder.py",
        "if run.result is not None:  # to start",
        "if False:  # to start",
        "test_run_folders.py",
    ),
    Mutant(
        "16 bits cut off",
        "data/folder.py",
        'if own.startswith("I;16"):',
        "if False:",
        "test_data.py",
    ),
    Mutant(
        "other classes are evaluated",
        "training/run_evaluation.py",
        "if run.classes and run.classes != tuple(source.classes)",
        "if False and run.classes != tuple(source.classes)",
        "test_training.py",
    ),
    Mutant(
        "a run goes on with other data",
        "training/recipe_data.py",
        "if then not in (None, now):",
        "if False:",
        "test_training.py",
    ),
    Mutant(
        "gradients that nobody asked for",
        "util/compat.py",
        "needed and _will_run(next(nodes))",
        "needed",
        "test_wanted_gradients.py",
    ),
    Mutant(
        "gradients by the order of inputs",
        "util/compat.py",
        "for node, _ in ctx.next_functions if node is not None)",
        "for node, _ in reversed(ctx.next_functions) if node is not None)",
        "test_wanted_gradients.py",
    ),
    Mutant(
        "tanh: sign of the slope in n",
        "formulas/magnitudes.py",
        "d = alpha * (1.0 - t * t) * r",
        "d = -alpha * (1.0 - t * t) * r",
        "test_operators.py",
    ),
    Mutant(
        "tanh: the same, slopes unchecked",
        "formulas/magnitudes.py",
        "return alpha * t, d, -d * q",
        "return alpha * t, -d, -d * q",
        "test_operators.py",
        True,
    ),
    Mutant(
        "tanh: ρ slope zeroed",
        "formulas/magnitudes.py",
        "return alpha * t, d, -d * q",
        "return alpha * t, d, 0.0 * q",
        "test_operators.py",
        True,
    ),
    Mutant(
        "sigmoid: k slope halved",
        "formulas/angulars.py",
        "- bend * s / k",
        "- 0.5 * bend * s / k",
        "test_operators.py",
        True,
    ),
    Mutant(
        "epilogue: ρ slope zeroed",
        "ops/cpu/passes.py",
        "to_kernels(grad_h * h_rho)",
        "to_kernels(0.0 * grad_h * h_rho)",
        "test_operators.py",
    ),
    Mutant(
        "epilogue: sign of the angle's share of ∂n",
        "ops/cpu/passes.py",
        "-((grad_c * c).sum(",
        "((grad_c * c).sum(",
        "test_operators.py",
    ),
    Mutant(
        "epilogue: clamp dropped",
        "ops/cpu/passes.py",
        "return c.clamp(-1.0, 1.0) if clamped else c",
        "return c",
        "test_extremes.py",
    ),
    Mutant(
        "epilogue: gradient through a dead ReLU",
        "ops/cpu/passes.py",
        "threshold_backward(e, y, 0.0)",
        "threshold_backward(e, y, -1.0)",
        "test_programs.py",
    ),
    Mutant(
        "epilogue: the clamp's mask never used",
        "ops/cpu/passes.py",
        "kind, eps, clamped\n",
        "kind, eps, False\n",
        "test_programs.py",
    ),
    Mutant(
        "epilogue: a chunk beyond the clamp left as it is",
        "ops/cpu/passes.py",
        "                program(*parts)\n",
        "",
        "test_programs.py",
    ),
    Mutant(
        "outer: a point too few",
        "ops/cpu/tanh_interpolation.py",
        "math.ceil(math.log(",
        "math.floor(math.log(",
        "test_tanh_interpolation.py",
    ),
    Mutant(
        "outer: the first value not taken out",
        "ops/cpu/tanh_interpolation.py",
        "values[:, :, 1:] - first",
        "values[:, :, 1:]",
        "test_tanh_interpolation.py",
    ),
    Mutant(
        "outer: products rounded to bfloat16",
        "ops/cpu/tanh_interpolation.py",
        " or not _exact_products():",
        ":",
        "test_tanh_interpolation.py",
    ),
    Mutant(
        "programs: a result of all chunks handed out",
        "ops/cpu/record.py",
        ' or copy.op == "placeholder")',
        ")",
        "test_programs.py",
    ),
    Mutant(
        "programs: what is kept written over", "ops/cpu/placement.py", "or made_of in wanted ", "", "test_programs.py"
    ),
    Mutant(
        "programs: what is read later written over",
        "ops/cpu/placement.py",
        "if any(order[user] > order[node] for user in made_of.users):",
        "if False:",
        "test_programs.py",
    ),
    Mutant(
        "eager: w/‖w‖ as if ‖w‖ did not depend on w",
        "ops/cpu/autograd.py",
        "along - length * one_over_norm",
        "along",
        "test_operators.py",
    ),
    Mutant(
        "patch norm: the gradient of a window one off",
        "ops/cpu/box_sum.py",
        "differentiable_sums(grad, ctx.windows, not",
        "differentiable_sums(grad, tuple(w._replace(before=w.before + 1) for w in ctx.windows), not",
        "test_operators.py",
    ),
    Mutant(
        "programs: what is read again written over",
        "ops/cpu/placement.py",
        "last[argument] is node",
        "True",
        "test_programs.py",
    ),
    Mutant(
        "programs: the caller's tensor written over",
        "ops/cpu/placement.py",
        ' or "out" in argument.kwargs:',
        ":",
        "test_programs.py",
    ),
    Mutant(
        "programs: a sum before a factor that varies",
        "ops/cpu/rewriting.py",
        'or factor.meta["size"][dim] == 1 for',
        'or factor.meta["size"][dim] > 0 for',
        "test_programs.py",
    ),
    Mutant(
        "programs: a sign lost", "ops/cpu/rewriting.py", "(*factors, -1.0))", "(*factors, 1.0))", "test_operators.py"
    ),
    Mutant(
        "programs: scratch memory used again too early",
        "ops/cpu/placement.py",
        "if until < order[node]",
        "if True",
        "test_programs.py",
    ),
    Mutant(
        "programs: results handed out in scratch memory",
        "ops/cpu/placement.py",
        "            or node in returned\n",
        "",
        "test_programs.py",
    ),
    Mutant(
        "depthwise: the mean's share of the norms' gradient dropped",
        "ops/cpu/depthwise.py",
        "of_n[rows] if of_mean is None else of_n[rows] + of_mean",
        "of_n[rows]",
        "test_cpu_depthwise.py",
    ),
    Mutant(
        "depthwise: only the last images' share of the kernels' gradient",
        "ops/cpu/depthwise.py",
        "a if a is None or b is None else a.add_(b)",
        "b",
        "test_cpu_depthwise.py",
    ),
    Mutant(
        "depthwise: a later chunk's clamp forgotten",
        "ops/cpu/depthwise.py",
        "                clamped, program = True, programs_of(kind, True, False).forward(*given)\n"
        "                program(out, d, n, one_over_n)\n",
        "                pass\n",
        "test_cpu_depthwise.py",
    ),
    Mutant(
        "eager: half the norms' gradient",
        "ops/cpu/autograd.py",
        "(2.0 * of_squares)",
        "(1.0 * of_squares)",
        "test_operators.py",
    ),
    Mutant(
        "layer in C: the mean's share of the norms' gradient dropped",
        "ops/cpu/native/layer.c",
        "if (of_batch) l.of_each[g]",
        "if (0) l.of_each[g]",
        "test_native_epilogue.py",
    ),
    Mutant(
        "layer in C: w/‖w‖ as if ‖w‖ did not depend on w",
        "ops/cpu/native/layer.c",
        " - (float)product * inverse * inverse * inverse",
        "",
        "test_native_epilogue.py",
    ),
    Mutant(
        "layer in C: a mean that is not finite moves the average",
        "ops/cpu/native/layer.c",
        "if (!isfinite(means[g])) {",
        "if (0) {",
        "test_native_layer.py",
    ),
    Mutant(
        "layer in C: a recomputation moves the average",
        "ops/cpu/native_layer.py",
        "if running is None or batches is None or recomputing():",
        "if running is None or batches is None:",
        "test_native_layer.py",
    ),
    Mutant(
        "layer in C: second derivatives go through what x was made of",
        "ops/cpu/native_layer.py",
        "t.view_as(t) if t is not None and want else t",
        "t",
        "test_native_epilogue.py",
    ),
    Mutant(
        "layer in C: few positions, a kernel's norms added up twice",
        "ops/cpu/native/epilogue.c",
        "add_blocks(of_norms, few, least(16 * few, width));",
        "add_blocks(of_norms, few, width);",
        "test_native_epilogue.py",
    ),
    Mutant(
        "norms in C: a window one column off",
        "ops/cpu/native/norms.c",
        "long offset = j * w->apart - w->before;",
        "long offset = j * w->apart - w->before + 1;",
        "test_native_layer.py",
    ),
    Mutant(
        "norms in C: the sign of their gradient",
        "ops/cpu/native/norms.c",
        "t[i] = (of_norm[i] + of_each) / norm[i];",
        "t[i] = -(of_norm[i] + of_each) / norm[i];",
        "test_native_epilogue.py",
    ),
    Mutant(
        "depthwise in C: the last lane of a block left out of the sums",
        "ops/cpu/native/lanes.c",
        "lane < b.lanes; lane++) {\n        double of_mean",
        "lane < b.lanes - 1; lane++) {\n        double of_mean",
        "test_native_depthwise.py",
    ),
    Mutant(
        "depthwise in C: a column of taps left out of the gradient of x",
        "ops/cpu/native/lanes_spread.h",
        "const long count = usual ? 3 : along->count;",
        "const long count = usual ? 2 : along->count;",
        "test_native_depthwise.py",
    ),
    Mutant(
        "depthwise in C: kernels upside down in the gradient of x",
        "ops/cpu/native/rows.h",
        "m->weights[(r + SIDE - 1 - row) * SIDE + u] * e",
        "m->weights[(row - r) * SIDE + u] * e",
        "test_native_depthwise.py",
    ),
    Mutant(
        "depthwise in C: E{‖x‖} has no gradient",
        "ops/cpu/native/depthwise.c",
        "of_mean += sum * rho;",
        "of_mean += 0.0 * sum * rho;",
        "test_native_depthwise.py",
    ),
    Mutant(
        "patch norm: eps dropped",
        "ops/norms.py",
        "return (squares + eps).sqrt()",
        "return squares.sqrt()",
        "test_extremes.py",
    ),
    Mutant(
        "eager: another eps for kernels",
        "ops/cpu/autograd.py",
        "w_norm = norms.kernel_norm(weight, eps)",
        "w_norm = norms.kernel_norm(weight, 0.0)",
        "test_operators.py",
    ),
    Mutant(
        "patch norm: stride ignored in the pooling",
        "ops/norms.py",
        "F.avg_pool2d(maps, geometry.kernel_size, geometry.stride, divisor_override=1)",
        "F.avg_pool2d(maps, geometry.kernel_size, 1, divisor_override=1)",
        "test_operators.py",
    ),
    Mutant(
        "patch norm: stride ignored between dilated taps",
        "ops/norms.py",
        "slice(j * apart, end, step)",
        "slice(j * apart, end)",
        "test_operators.py",
    ),
    Mutant(
        "patch norm: padding_mode ignored",
        "ops/norms.py",
        "    maps = geometry.pad(maps)",
        "    maps = F.pad(maps, geometry.pads)",
        "test_operators.py",
    ),
    Mutant(
        "patch norm: dilation ignored",
        "ops/norms.py",
        "slice(j * apart, end, step)",
        "slice(j, (j + 1 - size) or None, step)",
        "test_operators.py",
    ),
    Mutant(
        "convolution: padding_mode ignored",
        "ops/geometry.py",
        'if self.padding_mode != "zeros" or any(',
        "if any(",
        "test_identity.py",
    ),
    Mutant("E detached", "ops/mean_norm.py", "else norms.mean(", "else norms.detach().mean(", "test_gradients.py"),
    Mutant(
        "training uses the average",
        "layers/decoupled.py",
        "if self.training and has_mean:",
        "if False:",
        "test_layers.py",
    ),
    Mutant(
        "groups share one E",
        "ops/mean_norm.py",
        "else norms.mean([0, *range(2, norms.dim())])",
        "else norms.mean().expand(norms.shape[1])",
        "test_layers.py",
    ),
    Mutant(
        "running momentum wrong",
        "ops/mean_norm.py",
        "== 1, share, momentum)",
        "== 1, share, 1.0 - momentum)",
        "test_layers.py",
    ),
    Mutant(
        "first batch averaged",
        "ops/mean_norm.py",
        "torch.where(seen == 1, share, momentum)",
        "share * 0 + momentum",
        "test_layers.py",
    ),
    Mutant(
        "recomputation counted",
        "util/compat.py",
        "return backward_pass() != -1",
        "return False",
        "test_layers.py",
    ),
    Mutant(
        "evaluation uses the batch",
        "layers/decoupled.py",
        "if self.training and has_mean:",
        "if has_mean:",
        "test_layers.py",
    ),
    Mutant(
        "sync: gradient not summed over ranks",
        "ops/mean_norm.py",
        "return _SumOverRanks.apply(grad.contiguous())",
        "return grad",
        "test_distributed.py",
    ),
    Mutant(
        "sync: plain mean of means",
        "ops/mean_norm.py",
        "torch.full_like(sums[:1], norms[:, 0].numel())",
        "torch.ones_like(sums[:1]) * 100",
        "test_distributed.py",
    ),
    Mutant(
        "projection: eps inside the norm",
        "layers/optimization.py",
        "scale / norm, 1.0)",
        "scale / (norm.square() + 1e-4).sqrt(), 1.0)",
        "test_optimization.py",
    ),
    Mutant(
        "where: the first decoupled layer is taken for the first of the network",
        "layers/selection.py",
        "Selection(where, alike, layers or alike)",
        "Selection(where, layers)",
        "test_where.py",
    ),
    Mutant(
        "projection: weighted layers too",
        "layers/optimization.py",
        "if layer.weighting is not None:",
        "if False:",
        "test_optimization.py",
    ),
    Mutant(
        "weighted gradients: eps forgotten",
        "layers/weighted_gradients.py",
        "root(squares, self.eps)",
        "root(squares, 0.0)",
        "test_optimization.py",
    ),
    Mutant(
        "weighted gradients: only those of the parts of FSDP2",
        "layers/decoupled.py",
        "self.weighted_gradient.of(self.weight)",
        "pass",
        "test_fsdp.py",
    ),
    Mutant(
        "projection: lost in whole kernels of FSDP2",
        "layers/sharding.py",
        "        module.reshard()",
        "        pass",
        "test_fsdp.py",
    ),
    Mutant(
        "penalty: of the parts of FSDP2", "layers/sharding.py", "if is_sharded(weight):", "if False:", "test_fsdp.py"
    ),
    Mutant(
        "a mean that is not finite enters the average",
        "ops/mean_norm.py",
        "torch.where(finite, mean",
        "torch.where(finite | True, mean",
        "test_layers.py",
    ),
    Mutant(
        "a mean that is not finite is counted", "ops/mean_norm.py", "add_(finite.all())", "add_(1)", "test_layers.py"
    ),
    Mutant(
        "the kernels' average takes what is not finite",
        "ops/fused/kernels/statistics.py",
        "finite = (value - value == 0.0) & inside",
        "finite = (value == value) & inside",
        "test_layers.py",
    ),
    Mutant(
        "jit: functions of ours recorded",
        "util/compat.py",
        "and torch._C._is_tracing()",
        "and False",
        "test_ecosystem.py",
    ),
    Mutant(
        "conversion: the fast path of transformers",
        "converting/other_code.py",
        "activation_relu_or_gelu = 0",
        "activation_relu_or_gelu = 1",
        "test_convert.py",
    ),
    Mutant(
        "conversion: half a model after an error",
        "converting/convert.py",
        "            module.__class__ = kind\n",
        "",
        "test_convert.py",
    ),
    Mutant(
        "conversion: new parameters decay",
        "converting/optimizers.py",
        '{"weight_decay": 0.0} if',
        "{} if",
        "test_convert.py",
    ),
    Mutant(
        "penalty: groups mixed",
        "layers/penalties.py",
        "(layer._kernels_and_groups()[1], -1)",
        "(1, -1)",
        "test_optimization.py",
    ),
    Mutant("separate: α twice", "ops/operator.py", 'return (("alpha", 1.0),) if', "return () if", "test_extremes.py"),
    Mutant(
        "half precision: norms in bf16",
        "ops/norms.py",
        "x.to(compute_dtype(x)).square().unflatten(1, (groups, -1)).sum(2)",
        "x.square().unflatten(1, (groups, -1)).sum(2).to(compute_dtype(x))",
        "test_operators.py",
    ),
    Mutant(
        "fused: BatchNorm's averages stay",
        "ops/fused/kernels/statistics.py",
        "            move_norm(running_mean, running_var, mean, variance, unbiased, momentum, at, ok)",
        "            move_norm(running_mean, running_var, mean, variance, unbiased, 0.0, at, ok)",
        "test_fused_training.py",
    ),
    Mutant(
        "fused: variance as it is",
        "ops/fused/kernels/statistics.py",
        "(variance * unbiased - old)",
        "(variance - old)",
        "test_fused_training.py",
    ),
    Mutant(
        "fused: E detached",
        "ops/fused/plan.py",
        "tiles.mean_parts, 1.0 / max(1, self.norms.count)",
        "tiles.mean_parts, 0.0",
        "test_fused_training.py",
    ),
    Mutant(
        "fused: the norms' gradient left out",
        "ops/fused/norm_plan.py",
        "        if not add:\n            return [box]\n",
        "        if True:\n            return [box]\n",
        "test_fused_training.py",
    ),
    Mutant(
        "launcher: an offset left out",
        "ops/fused/launch.h",
        "address[place[1]] + place[2]",
        "address[place[1]]",
        "test_compiled_launcher.py",
    ),
    Mutant(
        "launcher: numbers in another order",
        "ops/fused/native.py",
        'floats.append(struct.pack("<QQ", number, changing[i]))',
        'floats.append(struct.pack("<QQ", number, 0))',
        "test_compiled_launcher.py",
    ),
    Mutant(
        "C++: the gradient behind a residual is the incoming one",
        "ops/fused/cpp/passes.h",
        "key.behind ? behind : e",
        "e",
        "test_host.py",
    ),
    Mutant(
        "C++: a recomputation counted",
        "ops/fused/cpp/module.cpp",
        "!= Py_None && !again)",
        "!= Py_None)",
        "test_host.py",
    ),
    Mutant(
        "C++: unaligned memory",
        "ops/fused/cpp/node.h",
        "% 16 == 0",
        "% 2 == 0",
        "test_host.py",
    ),
    Mutant(
        "graphs: projections not counted after a failed recording",
        "training/state.py",
        "            self.counts = True\n",
        "",
        "test_training.py",
    ),
    Mutant(
        "depthwise: E{‖x‖} has no gradient",
        "ops/fused/kernels/depthwise.py",
        "everywhere / n, 0.0)",
        "0.0 * everywhere / n, 0.0)",
        "test_fused_depthwise.py",
    ),
    Mutant(
        "depthwise: norms' gradient of one column only",
        "ops/fused/kernels/depthwise.py",
        "    for kw in tl.static_range(KW):\n        zw = w + PW - kw * DW\n        ok = (inside",
        "    for kw in tl.static_range(1):\n        zw = w + PW - kw * DW\n        ok = (inside",
        "test_fused_depthwise.py",
    ),
    Mutant(
        "depthwise: a window that ignores the stride",
        "ops/fused/kernels/depthwise.py",
        "zh = h * SH - PH + kh * DH",
        "zh = h - PH + kh * DH",
        "test_fused_depthwise.py",
    ),
    Mutant(
        "depthwise: maps kept",
        "ops/fused/autograd.py",
        "norms = None if plan.depthwise else kept.norms",
        "norms = kept.norms",
        "test_fused_depthwise.py",
    ),
    Mutant(
        "fused: a batch with a NaN counted",
        "ops/fused/kernels/statistics.py",
        "tl.store(batches, tl.load(batches) + 1, mask=finite == 0)",
        "tl.store(batches, tl.load(batches) + 1)",
        "test_fused_depthwise.py",
    ),
    Mutant(
        "fused: recomputation counted",
        "ops/fused/op.py",
        "(0, 0.0) if recomputing() else ",
        "",
        "test_fused_training.py",
    ),
    Mutant(
        "fused: tiles beyond the map",
        "ops/fused/tiles.py",
        '"EVEN": self.view.positions % division.positions == 0',
        '"EVEN": True or self.view.positions % division.positions == 0',
        "test_fused_training.py",
    ),
    Mutant(
        "fused: the last kernels of a grouped layer not normalized",
        "ops/fused/norm_plan.py",
        "kernel_programs = cdiv(self.count, groups) if wanted else 0",
        "kernel_programs = self.count // groups - 1 if wanted else 0",
        "test_fused.py",
    ),
    Mutant(
        "fused: a variant for every width",
        "ops/fused/tiles.py",
        '"BR": max(1, _SUMMED // bk)',
        '"BR": triton.next_power_of_2(before.programs)',
        "test_first_use.py",
    ),
    Mutant(
        "fused: rows of sums of another pass",
        "ops/fused/plan.py",
        "arguments | there | last, tiles.output, tiles.statistics",
        "arguments | there | last, tiles.output, tiles.gradients._replace(programs=1)",
        "test_fused_training.py",
    ),
    Mutant(
        "fused: energies of the third map on left out",
        "ops/fused/kernels/norms.py",
        "for first in range(0, maps, MAPS):",
        "for first in range(0, MAPS, MAPS):",
        "test_chain.py",
    ),
    Mutant(
        "fused: gradients of the third map on left out",
        "ops/fused/kernels/norms.py",
        "for before in range(0, maps, MAPS):",
        "for before in range(0, MAPS, MAPS):",
        "test_chain.py",
    ),
    Mutant(
        "fused: rows and planes confused",
        "ops/fused/kernels/common.py",
        "row - plane * H, i - row * W",
        "row - b * H, i - row * W",
        "test_fused.py",
    ),
    Mutant(
        "C++: a graph's depthwise layer waits for kernels it does not need",
        "ops/fused/host.py",
        'self._kernels(plan.again) if again else b""',
        "self._kernels(plan.again)",
        "test_host.py",
    ),
    Mutant(
        "fused: BatchNorm's gradient without its line",
        "ops/fused/kernels/backward.py",
        "e = e - (constant + along * y)",
        "e = e - constant",
        "test_fused_training.py",
    ),
    Mutant(
        "fused: gradient in front of the activation",
        "ops/fused/plan.py",
        'arguments |= {"e_ptr": at["behind"], "e_more": None, "ACTIVATION": 0,',
        'arguments |= {"e_more": None, "ACTIVATION": 0,',
        "test_fused.py",
    ),
    Mutant(
        "chain: energies too large",
        "ops/fused/kernels/forward.py",
        "0.5 * tl.sum(y * y, 1)",
        "0.6 * tl.sum(y * y, 1)",
        "test_chain.py",
    ),
    Mutant(
        "chain: only the first map",
        "ops/fused/kernels/norms.py",
        "        at += rows\n    n =",
        "    n =",
        "test_chain.py",
    ),
    Mutant(
        "chain: the energy's gradient left out",
        "ops/fused/kernels/backward.py",
        "in_p, other=0.0)[:, None] * out",
        "in_p, other=0.0)[:, None] * 0.0",
        "test_chain.py",
    ),
    Mutant(
        "recovered: the dot product taken for the output",
        "ops/fused/kernels/backward.py",
        "ratio = d * tl.where(largest != 0.0, 1.0 / largest, 0.0)",
        "ratio = d * one_over_n",
        "test_fused.py",
    ),
    Mutant(
        "recovered: with a bias too",
        "ops/fused/api.py",
        "post_ops.is_relu and inputs.bias is None and operator.is_cosine",
        "post_ops.is_relu and operator.is_cosine",
        "test_fused.py",
    ),
    Mutant(
        "recovered: for every angular function",
        "ops/fused/api.py",
        "inputs.bias is None and operator.is_cosine and not compiling",
        "inputs.bias is None and not compiling",
        "test_fused.py",
    ),
    Mutant(
        "graph in C++: forward's and backward's plans mixed up",
        "ops/fused/cpp/graph.h",
        'std::string key(backward ? "backward" : "forward");',
        "std::string key;",
        "test_host.py",
    ),
    Mutant(
        "graph in C++: a replaced formula kept",
        "ops/fused/host.py",
        "on_replacement(module.forget)",
        "on_replacement(lambda: None)",
        "test_host.py",
    ),
    Mutant(
        "graph sums: a sum that others read",
        "ops/fused/graph_sums.py",
        " and len(node.users) == 1",
        "",
        "test_graph_sums.py",
    ),
    Mutant(
        "graph sums: a summand that broadcasts",
        "ops/fused/graph_sums.py",
        "there.shape == wanted.shape and ",
        "",
        "test_graph_sums.py",
    ),
    Mutant(
        "graph sums: a sum that the call reads twice",
        "ops/fused/graph_sums.py",
        " or total in rest",
        "",
        "test_graph_sums.py",
    ),
    Mutant(
        "graph sums: Inductor told of the sum",
        "ops/fused/graph_sums.py",
        "if EAGER_INPUTS in node.meta:",
        "if False:",
        "test_graph_sums.py",
    ),
    Mutant(
        "graph sums: the second gradient in another memory order",
        "ops/fused/op.py",
        "None if e_more is None else plan.ordered(e_more)",
        "e_more",
        "test_graph_sums.py",
    ),
    Mutant(
        "graphs: kernels of length 0",
        "ops/fused/library.py",
        "torch.where(w_norm > 0, 1 / w_norm, 0)",
        "(1 / w_norm)",
        "test_graph_sums.py",
    ),
    Mutant(
        "graphs: no sign of the code they were made for",
        "ops/fused/operands.py",
        "*o.operator.names, CODE))",
        "*o.operator.names))",
        "test_graph_sums.py",
    ),
    Mutant(
        "first use: nothing for backward after inference",
        "ops/fused/op.py",
        "if keep not in plan.used:",
        "if not plan.used:",
        "test_first_use.py",
    ),
    Mutant(
        "first use: an unlikely backward pass one by one",
        "ops/fused/op.py",
        "if key not in plan.used:",
        "if False:",
        "test_first_use.py",
    ),
    Mutant(
        "first use: the second gradient's dtype guessed",
        "ops/fused/first_use.py",
        '"e", "e_more", ',
        '"e", ',
        "test_first_use.py",
    ),
    Mutant(
        "first use: no kernel compiled by processes",
        "ops/fused/compilers.py",
        'known[1].backend != "cuda"',
        'known[1].backend == "cuda"',
        "test_compile_worker.py",
    ),
    Mutant(
        "first use: formulas compiled with other arithmetic, which is not found in Triton's cache",
        "ops/fused/compile_worker.py",
        "import_module(arithmetic)",
        'import_module("dcnet.ops.fused.triton_math")',
        "test_compile_worker.py",
    ),
    Mutant(
        "first use: PyTorch imported by every process",
        "ops/fused/triton_math16.py",
        "import triton\n",
        "import torch\nimport triton\n",
        "test_compile_worker.py",
    ),
    Mutant(
        "external: a question that torch.fx cannot follow",
        "models/external.py",
        "@fx.wrap  # torch.fx",
        "# torch.fx",
        "test_fuse.py",
    ),
    Mutant(
        "tables: attacks on another training counted",
        "tables/ledger.py",
        "self.counting[cell_of(entry.recipe)] = {None: entry}",
        "self.counting.setdefault(cell_of(entry.recipe), {})[None] = entry",
        "test_tables.py",
    ),
    Mutant(
        "tables: records of a restored run replaced",
        "tables/runner.py",
        "shutil.copy(record, folder / name)",
        "pass",
        "test_tables.py",
    ),
    Mutant(
        "restore: other weights of the recipe taken for these",
        "training/restore.py",
        "if not same:",
        "if False:",
        "test_restore.py",
    ),
    Mutant(
        "tables: the last network not attacked",
        "tables/runner.py",
        "not any(task.ready for task in waiting)",
        "not ready",
        "test_tables.py",
    ),
    Mutant(
        "fuse: traced in one mode",
        "fusing/readers.py",
        "for training in modes:",
        "for training in modes[-1:]:",
        "test_fuse.py",
    ),
    Mutant(
        "fuse: what waits is known to all threads",
        "fusing/fusion.py",
        "class _Waiting(threading.local):",
        "class _Waiting:",
        "test_fuse.py",
    ),
    Mutant(
        "fuse: buffers as training left them",
        "fusing/running.py",
        "buffers[name] = buffer.copy_(before)",
        "buffers[name] = buffer",
        "test_fuse.py",
    ),
    Mutant(
        "fine-tuning: a decoupled file taken for a plain one",
        "training/weights.py",
        'if metadata.get("format") == CONVERTED:\n        conversion',
        'if metadata.get("format") == "":\n        conversion',
        "test_finetune.py",
    ),
    Mutant(
        "cutmix: labels by the wrong share",
        "data/resident.py",
        "/ self.size**2",
        "/ self.size",
        "test_data.py",
    ),
    Mutant(
        "fuse: a changed result behind an activation",
        "fusing/fusion.py",
        "if waits and not shared:",
        "if False:",
        "test_fuse.py",
    ),
    Mutant("chain: added before and after", "ops/fused/host.py", "add=plan.maps == 0", "add=True", "test_chain.py"),
    Mutant(
        "chain: the sum behind a residual forgotten",
        "ops/fused/operands.py",
        "depends = o.activation != 0 or of_left is not None",
        "depends = o.activation != 0",
        "test_chain.py",
    ),
    Mutant(
        "chain: hooks overlooked",
        "layers/chain.py",
        " and not hooked(module)",
        "",
        "test_chain.py",
    ),
    Mutant(
        "chain: energies of another tensor",
        "ops/fused/api.py",
        "if x is inputs.x and geometry.groups == 1 else None",
        "if geometry.groups == 1 else None",
        "test_chain.py",
    ),
    Mutant(
        "data: shifts drawn for each rank",
        "data/resident.py",
        "numbers[positions] for numbers",
        "numbers[: len(picks)] for numbers",
        "test_data.py",
    ),
    Mutant(
        "data: mirrored with the edge twice",
        "data/resident.py",
        "2 * (self.size - 1) - at",
        "2 * self.size - 1 - at",
        "test_data.py",
    ),
    Mutant(
        "data: the same order every epoch",
        "data/order.py",
        "(seed, _ORDER, epoch)",
        "(seed, _ORDER, 0)",
        "test_data.py",
    ),
    Mutant(
        "training: plateaus forgotten",
        "training/state.py",
        'self.schedule.load_state_dict(state["schedule"])',
        "pass",
        "test_training.py",
    ),
    Mutant(
        "training: random state forgotten",
        "training/state.py",
        'torch.set_rng_state(tensors["random/cpu"])',
        "pass",
        "test_training.py",
    ),
    Mutant(
        "training: saved without looking",
        "training/trainer.py",
        "    _stop_if_not_finite(state, data, per_epoch)\n    state.save(run)",
        "    state.save(run)",
        "test_training.py",
    ),
    Mutant(
        "training: moving averages disagree",
        "training/state.py",
        "            average_statistics_(self.ema.model)",
        "            pass",
        "test_training_distributed.py",
    ),
    Mutant(
        "training: parts not weighed",
        "training/state.py",
        "classification_loss(logits, their, recipe) / size\n",
        "classification_loss(logits, their, recipe) / len(their)\n",
        "test_training.py",
    ),
    Mutant(
        "robustness: out of the ball",
        "robustness/gradient_attacks.py",
        "torch.maximum(torch.minimum(found, images + eps), images - eps)",
        "found",
        "test_robustness.py",
    ),
    Mutant(
        "robustness: downhill",
        "robustness/gradient_attacks.py",
        "images + sign * eps * gradient.sign()",
        "images - sign * eps * gradient.sign()",
        "test_robustness.py",
    ),
    Mutant(
        "robustness: a gap of logits for a distance",
        "robustness/deepfool.py",
        "differences.abs() / largest / dual",
        "(differences.abs() + _BEYOND) / largest / dual",
        "test_robustness.py",
    ),
    Mutant(
        "robustness: NaN is an answer",
        "robustness/checks.py",
        "    finite = values.flatten(1).isfinite().all(1)",
        "    finite = values.flatten(1).isfinite().all(1) | True",
        "test_robustness.py",
    ),
    Mutant(
        "robustness: any boundary",
        "robustness/deepfool.py",
        "nearest = distance.argmin(1)",
        "nearest = distance.argmax(1)",
        "test_robustness.py",
    ),
    Mutant(
        "figures: slopes drawn",
        "figures/functions.py",
        "torch.full_like(argument, rho))[0]",
        "torch.full_like(argument, rho))[1]",
        "test_drawn.py",
    ),
    Mutant(
        "figures: classes mixed up",
        "figures/features.py",
        "points[labels == number]",
        "points[labels != number]",
        "test_drawn.py",
    ),
    Mutant(
        "figures: centers left out",
        "figures/features.py",
        "center = mine.mean(axis=0)",
        "center = mine[0]",
        "test_drawn.py",
    ),
    Mutant(
        "figures: layers upside down",
        "figures/layers.py",
        "len(layers) - 0.5, -0.5)",
        "-0.5, len(layers) - 0.5)",
        "test_drawn.py",
    ),
    Mutant(
        "figures: angles reversed",
        "figures/layers.py",
        "relative, cmap=SEQUENTIAL",
        "relative[:, ::-1], cmap=SEQUENTIAL",
        "test_drawn.py",
    ),
    Mutant(
        "figures: line not at π/2", "figures/layers.py", "axvline(math.pi / 2", "axvline(math.pi / 3", "test_drawn.py"
    ),
    Mutant(
        "figures: quartiles for radii",
        "figures/layers.py",
        "least, _, middle, _, most = np",
        "_, least, middle, most, _ = np",
        "test_drawn.py",
    ),
    Mutant(
        "figures: kernels without sign",
        "figures/layers.py",
        "0.5 * kernels / np",
        "0.5 * np.abs(kernels) / np",
        "test_drawn.py",
    ),
    Mutant(
        "figures: cosines without sign",
        "figures/layers.py",
        "= unit @ unit.T",
        "= np.abs(unit @ unit.T)",
        "test_drawn.py",
    ),
    Mutant("figures: ε not times 255", "figures/robustness.py", '(255.0 * p["eps"],', '(p["eps"],', "test_drawn.py"),
    Mutant(
        "figures: cross at the right ones",
        "figures/robustness.py",
        '"" if what["class"] ==',
        '"" if what["class"] !=',
        "test_drawn.py",
    ),
    Mutant(
        "figures: sign of the change",
        "figures/robustness.py",
        "0.5 * (changed - image)",
        "0.5 * (image - changed)",
        "test_drawn.py",
    ),
    Mutant(
        "figures: other quantiles",
        "figures/training.py",
        "for quantile in (1, 2, 3)",
        "for quantile in (0, 2, 4)",
        "test_drawn.py",
    ),
    Mutant(
        "inspection: unfooled first",
        "inspection/examples.py",
        "fooled = after.argmax(1) != labels",
        "fooled = after.argmax(1) == labels",
        "test_drawn.py",
    ),
    Mutant("inspection: ε of color images", "inspection/run.py", "_EPS_GRAY = 0.1", "_EPS_GRAY = EPS", "test_drawn.py"),
    Mutant(
        "inspection: sine for cosine",
        "inspection/layers.py",
        ".clamp(-1.0, 1.0).acos()",
        ".clamp(-1.0, 1.0).asin()",
        "test_inspection.py",
    ),
    Mutant(
        "inspection: never made again",
        "inspection/run.py",
        "known.get(name) == value for",
        "name in known for",
        "test_inspection.py",
    ),
    Mutant(
        "report: the best accuracy",
        "robustness/records.py",
        "accuracy, attack = min(",
        "accuracy, attack = max(",
        "test_records.py",
    ),
    Mutant(
        "tables: schedules mixed",
        "tables/table.py",
        "round(share * recipe.steps)",
        "round(recipe.steps)",
        "test_tables.py",
    ),
    Mutant(
        "tables: chance counts as a result", "tables/ledger.py", "100.0 - 200.0 / ", "101.0 - 0.0 / ", "test_tables.py"
    ),
    Mutant(
        "tables: done cells again",
        "tables/plan.py",
        "if ledger.find(recipe) is None or",
        "if True or",
        "test_tables.py",
    ),
    Mutant(
        "tables: a classifier is projected",
        "models/parts.py",
        "normalized.constrained = False",
        "normalized.constrained = True",
        "test_models.py",
    ),
    Mutant(
        "explorer: division turned round", "explorer/javascript.py", 'ast.Div: "/"', 'ast.Div: "*"', "test_explorer.py"
    ),
    Mutant(
        "power_cosine: slope in p without the logarithm",
        "formulas/angulars.py",
        "return value, p * a, value * m.log(s)",
        "return value, p * a, value",
        "test_gradients.py test_formulas.py",
        True,
    ),
    Mutant(
        "explanations: the scale not held fixed",
        "layers/linear_form.py",
        "    with torch.no_grad():\n        scale, constant = _fixed(layer, layer._patch_norms(x), dot, w_norm)",
        "    with torch.enable_grad():\n        scale, constant = _fixed(layer, layer._patch_norms(x), dot, w_norm)",
        "test_explanations.py",
    ),
    Mutant(
        "explanations: no limit at a right angle",
        "layers/linear_form.py",
        "torch.where(orthogonal, slope, (g",
        "torch.where(orthogonal, 0.0, (g",
        "test_explanations.py",
    ),
    Mutant(
        "explanations: g at a right angle forgotten",
        "layers/linear_form.py",
        "(g - at_right_angle)",
        "g",
        "test_explanations.py",
    ),
    Mutant(
        "export: seg cut off on the other side",
        "layers/recording.py",
        "return line.clamp(max=alpha) if alpha >= beta else",
        "return line.clamp(max=alpha) if alpha <= beta else",
        "test_export.py",
    ),
    Mutant(
        "running: readers forgotten",
        "fusing/running.py",
        "made.readers.append(self._running[-1][0] if self._running else None)",
        "made.readers.append(None)",
        "test_running.py",
    ),
    Mutant(
        "running: a read by others overlooked in folding",
        "deploy/prepare.py",
        "output.readers == [norm]",
        "norm in output.readers",
        "test_export.py",
    ),
    Mutant(
        "where: another library's names with ours in front",
        "training/start.py",
        'prefix = "net." if isinstance(model, External) else ""',
        'prefix = ""',
        "test_where_in_recipes.py",
    ),
    Mutant(
        "formulas: a copy that was changed is executed",
        "formulas/sources.py",
        "if mark != f",
        "if not mark and mark != f",
        "test_export.py",
    ),
    Mutant(
        "explanations: two factors that depend on the image pass",
        "explaining/affine.py",
        "if len(factors) > 1 else",
        "if len(factors) > 2 else",
        "test_explanations.py",
    ),
    Mutant(
        "explanations: the mode outlasts its context",
        "explaining/context.py",
        "mode.over = True",
        "mode.over = False",
        "test_explanations.py",
    ),
    Mutant(
        "fused code: a forward that changed goes unseen",
        "fusing/own_code.py",
        "if self.owner is not None and self.owner.forward is not self.forward:",
        "if self.owner is not None and self.owner.forward is None:",
        "test_fused_code.py",
    ),
    Mutant(
        "fused code: a setting that changed goes unseen",
        "fusing/own_code.py",
        "if any(attributes.get(name, _MISSING) is not value for name, value in self.settings.items()):",
        "if any(attributes.get(name, value) is None for name, value in {}.items()):",
        "test_fused_code.py",
    ),
    Mutant(
        "fused code: an operation in place before the sum",
        "fusing/fused_code.py",
        "if joined.residual is not None and any(_writes(module, one) for one in _between(chain, joined)):",
        "if addition is not None and not all(_between(chain, addition)):",
        "test_fused_code.py",
    ),
    Mutant(
        "fused code: a sum in place into something else",
        "fusing/fused_code.py",
        "(in_place and total.args[0] is not last)",
        "(in_place and total.args[0] is None)",
        "test_fused_code.py",
    ),
    Mutant(
        "fusion: BatchNorm over another dimension",
        "fusing/fusion.py",
        "return self.norm is None or x.dim() == conv._dims + 2",
        "return self.norm is None or x.dim() >= conv._dims + 2",
        "test_fused_code.py",
    ),
    Mutant(
        "fusion: a part by itself is fused",
        "fusing/fusion.py",
        "return not elsewhere and self.holds(conv)",
        "return self.holds(conv)",
        "test_fused_code.py",
    ),
]


def plant(mutant: Mutant, folder: Path) -> None:
    """Change the copy of the package in the folder."""
    path = folder / "src" / "dcnet" / mutant.file
    text = path.read_text()
    if mutant.old not in text:
        raise SystemExit(
            f"{mutant.name}: {mutant.file} no longer holds {mutant.old!r}; bring tools/mutants.py up to date"
        )
    path.write_text(text.replace(mutant.old, mutant.new))
    if mutant.unchecked:
        path = folder / "src" / "dcnet" / "formulas" / "registration.py"
        path.write_text(path.read_text().replace("formula = checks.check_slopes(formula)", "pass"))


_LEFT_OUT = ("data", "runs", "build", "dist")  # large, and not part of the source


def survives(mutant: Mutant) -> bool:
    """Return whether the tests named pass although the mistake is there."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # all of it, as tests run examples and read pages: one that fails for a missing file would catch any mistake
        for part in (path for path in ROOT.iterdir() if path.name not in _LEFT_OUT and not path.name.startswith(".")):
            if part.is_dir():
                shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                shutil.copy(part, folder)
        plant(mutant, folder)
        tests = [f"tests/{test}" for test in mutant.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-n", "2", "-p", "no:cacheprovider", *tests]
        environment = os.environ | {"PYTHONPATH": str(folder / "src")}
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True).returncode == 0


def main() -> None:
    arguments = argparse.ArgumentParser(description="Plant known mistakes; the tests must catch each.")
    arguments.add_argument("names", nargs="*", help="only mutants whose names, or files, contain one of these")
    arguments.add_argument("--list", action="store_true", help="print the mutants and stop")
    options = arguments.parse_args()
    chosen = [m for m in MUTANTS if not options.names or any(n in m.name or n in m.file for n in options.names)]
    if options.list:
        print("\n".join(m.name for m in chosen))
        return
    # every file that is to notice something must pass without a mistake, or it would seem to notice all of them
    files = list(dict.fromkeys(test for mutant in chosen for test in mutant.tests.split()))
    if not survives(Mutant("no mistake", "__init__.py", "__version__", "__version__", " ".join(files))):
        raise SystemExit(f"tests fail without any mistake planted; mend that first. Among: {', '.join(files)}")
    survivors = []
    for mutant in chosen:
        start = time.perf_counter()
        alive = survives(mutant)
        print(f"{'SURVIVES' if alive else 'caught':9} {mutant.name}  ({time.perf_counter() - start:.0f} s)", flush=True)
        survivors += [mutant.name] if alive else []
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} caught")
    if survivors:
        raise SystemExit(f"survivors: {', '.join(survivors)}")


if __name__ == "__main__":
    main()
