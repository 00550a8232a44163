"""The kinds of fault, each as a rule that changes one line of a generated module.

A rule is a regular expression on a line without its indent, what takes the place of the match, and the functions whose
lines are looked at: kernels by what follows the spec's name, others by their own. Every match is a mutant. Kernels in
Gluon, `_staged`, have none: nothing but a GPU runs them.
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS = "forward|forward_chunked|forward_slabs|statistics"  # kernels that take the statistics of rows
FORWARD = "forward|forward_chunked|forward_slabs"
SLABS = "forward_slabs|backward_slabs"
BACKWARD = "backward|backward_slabs"
KERNELS = f"{ROWS}|{BACKWARD}|sum_partials"
# Through fp16 and back, but for fp64: it must be noticed with tensors of other dtypes.
FP16 = ".to(tl.float16 if compute == tl.float32 else compute).to(compute)"
FP16_OF_A = r"lanes = (\1).to(tl.float16 if a.dtype == tl.float32 else a.dtype).to(a.dtype)"


@dataclass(frozen=True)
class Rule:
    """`pattern` becomes `replacement` in the functions whose names match `where`."""

    name: str
    pattern: str
    replacement: str
    where: str = KERNELS


PRECISION = (
    Rule("a running sum in fp16", r"^((?!drift)\w+_lanes) = (?!tl\.zeros)(.+)", rf"\1 = (\2){FP16}"),
    Rule("a sum over rows in fp16", r"^(d\w+_sum) = (tl\.fma.+|.+ \+ .+)", rf"\1 = (\2){FP16}"),
    Rule("a sum over rows in fp16, blocks", r"^(d(?:gamma|beta)_blocks \+=) \((.+),\)", rf"\1 ((\2){FP16},)"),
    Rule("squares in fp16", r"tl\.fma\((\w+), \1, (\w+)\)", rf"\2 + (\1{FP16} * \1){FP16}"),
    Rule("products in fp16", r"^lanes = (.+)", FP16_OF_A, "_sum_of_products"),
    Rule("mean in fp16", r"^mean = (middle \+ drift)", rf"mean = (\1){FP16}"),
    Rule("variance in fp16", r"var = (square_sum .+|tl\.where.+)", rf"var = (\1){FP16}"),
    Rule("eps in fp16", r"epsilon = (tl\.full.+)", rf"epsilon = \1{FP16}"),
    Rule("rstd in the dtype of x", r"rstd = (_divide.+)", r"rstd = \1.to(x_ptr.dtype.element_ty).to(compute)", ROWS),
)

EPS = (
    Rule("eps moved out of the root", r"_sqrt\(var \+ epsilon\)", "(_sqrt(var) + epsilon)"),
    Rule("eps moved into the root", r"_sqrt\(var\) \+ epsilon", "_sqrt(var + epsilon)"),
    Rule("eps left out", r" \+ epsilon", ""),
    Rule("eps of the call not used", r"tl\.full\(\[1, 1\], epsilon,", "tl.full([1, 1], 1e-5,"),
    Rule("eps inside the root, backward", r"_divide\(slope, tl\.where\(.+?\)\)", "slope"),
)

ADDRESSES = (
    Rule("row offset on the weight", r"gamma_ptr \+ col", "gamma_ptr + row * H + col", FORWARD),
    Rule("row offset on the weight, backward", r"gamma_ptr \+ col", "gamma_ptr + program * H + col", BACKWARD),
    Rule("row offset on the bias", r"beta_ptr \+ col", "beta_ptr + row * H + col", FORWARD),
    *(
        Rule(f"stride of {tensor} taken as H", rf"row \* {tensor}_stride", "row * H")
        for tensor in ("x", "residual", "residual_out", "dy", "dresidual_out")
    ),
    Rule("stride of x taken for that of residual", r"row \* residual_stride", "row * x_stride"),
    Rule("statistics of all rows in one place", r"(tl\.store\((?:mean|rstd)_ptr \+ row)", r"\1 * 0", ROWS),
    Rule("results stored with the stride of x", r"(out_rows = \w+ \+ row \*) H", r"\1 x_stride"),
    Rule("gradients stored with the stride of dy", r"(d\w+_ptr \+ row \*) H", r"\1 dy_stride", BACKWARD),
    Rule("offsets of 32 bits", r"^(row = .+)\.to\(tl\.int64\)", r"\1"),
    Rule("one column further", r"_rows \+ col\b", "_rows + col + 1"),
    Rule("a parameter's next column", r"(gamma|beta)_ptr \+ col\b", r"\1_ptr + (col + 1) % H"),
    Rule("a parameter's first block for all", r"(gamma|beta)_early\[block\]", r"\1_early[0]"),
)

DENOMINATORS = (
    Rule("BLOCK_SIZE in place of H", r"\(1\.0 / H\)", "(1.0 / BLOCK_SIZE)"),
    Rule("lanes in place of H", r"\(1\.0 / H\)", "(1.0 / (BLOCKS * BLOCK_SIZE))", "forward|backward"),
    Rule("H - 1 in place of H", r"\(1\.0 / H\)", "(1.0 / (H - (H > 1)))"),
    Rule("lanes of a chunk in place of its columns", r"tl\.minimum\(H - start, BLOCK_SIZE\)", "BLOCK_SIZE"),
    Rule("lanes of a slab in place of its columns", r"tl\.minimum\(H - slab .+?\)", "(slab * 0 + BLOCK_SIZE)", SLABS),
    Rule("lanes of each slab in place of its columns", r"tl\.minimum\(H - lane .+?\)", "lane * 0 + BLOCK_SIZE", SLABS),
)

MASKS = (
    Rule("no mask on a load of rows", r"(tl\.load\(\w+(?:_rows|_stride).*?), mask=.+?, other=\d\.\d", r"\1"),
    Rule("no mask on a load of a parameter", r"(tl\.load\((?:gamma|beta)_ptr.*?), mask=.+?, other=\d\.\d", r"\1"),
    Rule("no mask on a load of a statistic", r"(tl\.load\((?:mean|rstd)_ptr.*?), mask=.+?, other=\d\.\d", r"\1"),
    Rule("no mask on a centred value", r"tl\.where\(col_mask, (.+), 0\.0\)", r"\1"),
    Rule("no mask on a store of rows", r"(tl\.store\(\w+(?:_rows| \+ row \* H) .+), mask=\w+(?=[,)])", r"\1"),
    Rule("no mask on a store of a statistic", r"(tl\.store\(\w+ \+ row, .+), mask=.+(?=\))", r"\1"),
    Rule("no mask on a store of sums", r"(tl\.store\(d\w+_ptr .+), mask=col_mask(?=\))", r"\1"),
    Rule("other is -inf", r"other=\d\.\d", 'other=-float("inf")'),
    Rule("other is 1 in place of 0", r"other=0\.0", "other=1.0"),
    Rule("row mask lost", r"(\brow_mask|\(row < N\)) & col_mask", "col_mask"),
    Rule("column mask lost", r"(\brow_mask|\(row < N\)) & col_mask", r"\1"),
    Rule("last row skipped", r"row < N", "row < N - 1"),
    Rule("first row skipped", r"row < N", "(row < N) & (row > 0)"),
    Rule("one row too many", r"row < N", "row <= N"),
    Rule("last column skipped", r"col < H", "col < H - 1", "_columns"),
    Rule("first column skipped", r"col < H", "(col < H) & (col > 0)", "_columns"),
    Rule("one column too many", r"col < H", "col <= H", "_columns"),
)

STORES = (
    Rule("1/rstd stored for rstd", r"(tl\.store\(rstd_ptr \+ row), rstd,", r"\1, _divide(1.0, rstd),"),
    Rule("variance stored for rstd", r"(tl\.store\(rstd_ptr \+ row), rstd,", r"\1, var,"),
    Rule("mean stored without its shift", r"(tl\.store\(mean_ptr \+ row), mean,", r"\1, shifted_mean,"),
    Rule("root taken for rstd", r"rstd = _divide\(1\.0, (.+)\)$", r"rstd = \1"),
    Rule("rstd off by 1 %", r"rstd = (_divide\(.+|tl\.load\(.+)", r"rstd = 1.01 * \1"),
    Rule("rstd off by 1e-4", r"rstd = (_divide\(.+|tl\.load\(.+)", r"rstd = 1.0001 * \1"),
    Rule("a column beyond the row stored", r"(tl\.store\(\w+_rows .+)mask=mask", r"\1mask=row_mask & (col <= H)"),
    Rule("a row beyond the last stored", r"(tl\.store\((\w+) \+ row, (\w+), .+)", r"\1; tl.store(\2 + row + 1, \3)"),
    # The third dimension of a grid, which no kernel looks at: the same values are stored once more.
    Rule("each tile walked twice", r"^(\(.+), 1\),$", r"\1, 2),", "_forward|_backward"),
    Rule("input overwritten", r"(tl\.store\(out_rows \+ col, (\w+), .+)", r"\1; tl.store(x_rows + col, \2, mask=mask)"),
)

STATISTICS = (
    Rule("statistics of the row before", r"(mean|rstd)_ptr \+ row(?=, mask)", r"\1_ptr + tl.maximum(row - 1, 0)"),
    Rule("mean not subtracted", r"(\w+) - (shifted_mean|mean|middle)\b", r"\1"),
    Rule("first element not subtracted", r"(?<=col_mask, )(\w+) - \w+_first", r"\1"),
    Rule("first element not added to the mean", r"middle = \w+ \+ shifted_mean", "middle = shifted_mean"),
    Rule("drift left out of x_hat", r"tl\.fma\((.+), rstd, -drift \* rstd\)", r"(\1) * rstd"),
    Rule("drift doubled in x_hat", r"-drift \* rstd", "-2.0 * drift * rstd"),
    # Not in backward, whose mean is rounded: what the drift adds to it, and its square, are less than that has lost.
    Rule("drift left out of the variance", r"^var = tl\.where.+", "var = square_mean", FORWARD),
    Rule("drift taken off infinite squares", r"^var = tl\.where.+", "var = square_mean - drift * drift", FORWARD),
    Rule("drift left out of the mean", r"^mean = middle \+ drift", "mean = middle", FORWARD),
    Rule(
        "drift of what is not centred",
        r"(drift_sum_lanes \+) centered",
        r"\1 tl.where(col_mask, centered + middle, 0.0)",
    ),
    Rule("drift of merged parts left out", r"^drift = (\w+) - .+", r"drift = 0.0 * \1"),
    Rule(
        "mean subtracted in an RMS norm",
        r"(x_hat|y) = (x|summed|residual_out) \* rstd",
        r"\1 = (\2 - tl.sum(\2, axis=1, keep_dims=True) / H) * rstd",
    ),
    Rule(
        "variance about the mean in an RMS norm",
        r"(\w+_lanes) = tl\.fma\((x|summed), \2, \1\)",
        r"\1 = \1 + tl.where(col_mask, \2 - tl.sum(\2, axis=1, keep_dims=True) / H, 0.0) * \2",
    ),
    Rule(
        "rows of a tile summed together",
        r"(tl\.sum\((?!drift)\w+_lanes, axis=1.+\))$",
        r"tl.sum(\1, axis=0, keep_dims=True)",
    ),
    Rule("last block or chunk alone", r"^(\w+_lanes) = \1 \+ (.+)", r"\1 = \2"),
    Rule("last block or chunk alone, products", r"^(\w+_lanes) = tl\.fma\((\w+), (\w+), \1\)", r"\1 = \2 * \3"),
    Rule("first block kept for all", r"_blocks\[block\]", "_blocks[0]"),
    Rule("first chunk skipped", r"tl\.range\(0, H,", "tl.range(BLOCK_SIZE, H,"),
    Rule("last chunk skipped", r"tl\.range\(0, H,", "tl.range(0, H - BLOCK_SIZE,"),
    Rule("chunks merged without weights", r"delta \* _divide\(count, total\)", "delta * 0.5"),
    Rule("spread between slabs left out", r"(within_sum_slabs) \+ .+\)$", r"\1)"),
    Rule("spread within slabs left out", r"within_sum_slabs \+ ", ""),
    Rule("spread between chunks left out", r"^square_sum \+= delta.+", "pass"),
)

ROUNDINGS = (
    Rule("rounding of x_hat dropped", r"^rounded = (\w+)\.to.+", r"rounded = \1", FORWARD),
    Rule("rounding of x_hat dropped, backward", r"^rounded = (\w+)\.to.+", r"rounded = \1", BACKWARD),
    Rule("rounding of the stored sum dropped", r"^summed = (\(.+\))\.to\(input_dtype\).+", r"summed = \1"),
    Rule("rounding moved behind the product", r"rounded \* gamma", "(x_hat * gamma).to(input_dtype).to(compute)"),
    Rule("sum rounded", r"^summed = (\w+ \+ \w+)$", r"summed = (\1).to(x_ptr.dtype.element_ty).to(compute)"),
    Rule("x_hat rounded", r"^x_hat = (\w+ \* rstd)$", r"x_hat = (\1).to(x_ptr.dtype.element_ty).to(compute)", FORWARD),
    Rule(
        "product rounded before the bias is added",
        r"tl\.fma\(x_hat, gamma, beta\)",
        "(x_hat * gamma).to(x_ptr.dtype.element_ty).to(compute) + beta",
        FORWARD,
    ),
    Rule("result rounded to bf16", r"(tl\.store\(out_rows \+ col, \w+)", r"\1.to(tl.bfloat16)"),
    Rule("stored sum rounded to bf16", r"(tl\.store\(residual_out_rows \+ col, \w+)", r"\1.to(tl.bfloat16)"),
    Rule("gradient rounded to bf16", r"(tl\.store\(dx\w+ \+ .+, dx|tl\.store\(dx.+, dsummed)", r"\1.to(tl.bfloat16)"),
    Rule("weight rounded", r"((gamma|beta) = .+)\.to\(comp", r"\1.to(x_ptr.dtype.element_ty).to(comp", FORWARD),
    Rule("weight rounded, backward", r"^(gamma = _widen.+)", r"\1.to(dy_ptr.dtype.element_ty).to(compute)", BACKWARD),
    Rule("gain rounded", r"gain = (gamma \+ .+)", r"gain = (\1).to(gamma_ptr.dtype.element_ty).to(compute)"),
    Rule(
        "partial sums in fp16",
        r"^(dgamma|dbeta) \+= (.+)",
        r"\1 = (\1 + \2).to(tl.float16 if \1.dtype == tl.float32 else \1.dtype).to(\1.dtype)",
        "sum_partials",
    ),
)

TERMS = r"tl\.fma\((x_hat|y), -dslope, (dx_hat|dy)( - dshift)?\)"
GRADIENTS = (
    Rule("weight offset forgotten", r"gain = gamma \+ .+", "gain = gamma", FORWARD),
    Rule("weight offset forgotten in dx", r"gain = gamma \+ .+", "gain = gamma", BACKWARD),
    Rule("weight offset subtracted", r"gain = gamma \+ ", "gain = gamma - "),
    Rule("shift term dropped", r" - dshift", ""),
    Rule("shift term doubled", r" - dshift", " - 2.0 * dshift"),
    Rule("shift term added", r" - dshift", " + dshift"),
    Rule("slope term dropped", TERMS, r"(\2\3)"),
    Rule("slope term doubled", TERMS, r"tl.fma(\1, -2.0 * dslope, \2\3)"),
    Rule("slope term added", TERMS, r"tl.fma(\1, dslope, \2\3)"),
    Rule("slope times dy", TERMS, r"tl.fma(\2, -dslope, \2\3)"),
    Rule("direct term dropped", TERMS, r"tl.fma(\1, -dslope, 0.0 * \2\3)"),
    Rule("direct term doubled", TERMS, r"tl.fma(\1, -dslope, 2.0 * \2\3)"),
    Rule("rstd left out of dx", rf"rstd \* (?={TERMS})", ""),
    Rule("rstd squared in dx", rf"rstd \* (?={TERMS})", "rstd * rstd * "),
    Rule("rstd left out of the slope", r"slope_sum \* rstd", "slope_sum"),
    Rule("rstd squared in the slope", r"slope_sum \* rstd", "slope_sum * rstd * rstd"),
    Rule("gradient of the stored sum dropped", r" \+ dresidual_out$", ""),
    Rule("gradient of the stored sum doubled", r" \+ dresidual_out$", " + 2.0 * dresidual_out"),
    Rule("weight left out of dx", r"dx_hat = dy \* \w+", "dx_hat = dy"),
    Rule("weight squared in dx", r"dx_hat = dy \* (\w+)", r"dx_hat = dy * \1 * \1"),
    Rule("slope without the weight", r"dx_hat(?=, \w+(?:, slope|\)))", "dy"),
    Rule("shift without the weight", r"(shift_sum_lanes \+|shift_sum = tl\.sum\() ?dx_hat", r"\1 dy"),
    Rule("dweight with the weight", r"tl\.fma\(dy, (x_hat|rounded), dgamma", r"tl.fma(dx_hat, \1, dgamma"),
    Rule("dweight dropped", r"tl\.fma\(dy, \w+, (dgamma_sum[^)]*)\)", r"\1"),
    Rule("dweight of dy alone", r"tl\.fma\(dy, (x_hat|rounded), dgamma", "tl.fma(dy, 1.0, dgamma"),
    Rule("dweight doubled", r"tl\.fma\(dy, (x_hat|rounded), dgamma", r"tl.fma(2.0 * dy, \1, dgamma"),
    Rule("dbias dropped", r"(dbeta_sum\S*) \+ dy", r"\1"),
    Rule("dbias with the weight", r"(dbeta_sum\S*) \+ dy", r"\1 + dx_hat"),
    Rule("dbias doubled", r"(dbeta_sum\S*) \+ dy", r"\1 + 2.0 * dy"),
    Rule("slope and shift exchanged", r"-dslope, (\w+) - dshift", r"-dshift, \1 - dslope"),
    Rule("dweight and dbias exchanged", r"^dx, dweight, dbias =", "dx, dbias, dweight =", "_backward"),
    Rule("gradient of residual left out", r"return None, dx, dx\b", "return None, dx, None", "_gradients"),
    Rule("gradient of x left out", r"return None, dx\b", "return None, None", "_gradients"),
)

SUMS = (
    Rule("last tile of a program alone", r"tl\.fma\((\w+), (\w+), d\w+_sum[\w\[\]]*\)", r"\1 * \2"),
    Rule("last tile of a program alone, dbias", r"dbeta_sum\S* \+ dy", "dy"),
    Rule("sums of a tile not kept", r"^d\w+_sum = d\w+_blocks$", "pass"),
    Rule("sums of the first block for all", r"_sum\[block\]", "_sum[0]"),
    Rule("last tile of partial sums alone", r"^(dgamma|dbeta) \+=", r"\1 =", "sum_partials"),
    Rule("first tile of partial sums skipped", r"tl\.range\(0, N, ", "tl.range(BLOCK_N, N, ", "sum_partials"),
    Rule("partial sums of one row alone", r"tl\.sum\((dgamma|dbeta), axis=0, .+?\)", r"\1", "sum_partials"),
    Rule("partial sums in one row", r"program \* H \+ col", "col"),
    Rule("partial sums of one program left out", r"^programs,$", "programs - 1,", "_backward"),
    Rule("first tile of each program skipped", r"tl\.range\(program, ", "tl.range(program + tl.num_programs(0), "),
    Rule("last tile skipped", r"\(N - 1\) // BLOCK_N \+ 1", "N // BLOCK_N", "backward"),
    Rule("last row skipped, slabs", r"tl\.range\(program, N,", "tl.range(program, N - 1,", SLABS),
    Rule("a quarter of the products left out", r"tl\.fma\(a_1, b_1, a_0 \* b_0\)", "a_0 * b_0", "_sum_of_products"),
    Rule("products of neighbours", r"a_3, b_3", "a_3, b_2", "_sum_of_products"),
)

EXCHANGE = (
    Rule("sums exchanged, stored", r"(tl\.store\(sums_ptr .+ \* 2), (?!slope)", r"\1 + 1, ", SLABS),
    Rule("both sums in one place", r"(tl\.store\(sums_ptr .+) \+ 1,", r"\1,", SLABS),
    Rule("one sum read for both", r"(tl\.load\(sums_ptr .+) \+ 1,", r"\1,", SLABS),
    Rule(
        "sums of the row before",
        r"^slabs_before = (.+) \* SLABS",
        r"slabs_before = tl.maximum(\1 - 1, 0) * SLABS",
        SLABS,
    ),
    Rule("sums of all rows in one place", r"row \* SLABS", "row * 0", SLABS),
    Rule("sums of all slabs in one place", r"row \* SLABS \+ slab", "row * SLABS", SLABS),
    Rule("sums of one slab for all", r"slabs_before \+ lane", "slabs_before + lane * 0", SLABS),
    Rule("last slab left out", r"lane < SLABS", "lane < SLABS - 1", SLABS),
    Rule("lanes beyond the slabs", r"(tl\.load\(sums_ptr .+), mask=lane < SLABS, other=0\.0", r"\1", SLABS),
    Rule("sums of the second launch not made in the first", r"^if POST:", "if not POST:", SLABS),
    Rule("largest in place of the sum", r"tl\.sum\(values", "tl.max(values", "_total"),
)

HOST = (
    Rule("grid one short", r"\(-\(-(N // BLOCK_N|H // BLOCK_SIZE)\), 1, 1\)", r"(\1, 1, 1)", "_forward|_backward"),
    Rule("slabs one short", r"SLABS = -\(-(H // BLOCK_SIZE)\)", r"SLABS = max(1, \1)", "_slab_launch"),
    Rule("blocks one short", r"BLOCKS = -\(-(H // BLOCK_SIZE)\)", r"BLOCKS = max(1, \1)", "_tile"),
    Rule("blocks one short, packed", r"return -\(?-H // BLOCK_SIZE\)", "return max(1, H // BLOCK_SIZE)", "_packed"),
    Rule("copy left out", r"rows = rows\.contiguous\(\)", "pass", "_rows"),
    Rule("copy not needed", r"rows\.stride\(1\) != 1 and H != 1", "True", "_rows"),
    Rule("layout not looked at", r"if tensor\.is_contiguous\(\)", "if True", "_rows"),
    Rule("layout of a parameter not looked at", r"^(weight|bias) = \1\.contiguous\(\)", "pass", "_forward|_backward"),
    Rule("results in the layout of x", r"torch\.contiguous_format", "torch.preserve_format", "_empty_like"),
    Rule("no rows not looked at", r"if N == 0", "if False", "_backward"),
    Rule("no rows, gradients left as they are", r"gradient\.zero_\(\)", "gradient", "_backward"),
    Rule("ones for an absent gradient", r"torch\.zeros", "torch.ones", "_absent"),
    Rule("absent gradient left as it is", r"torch\.zeros", "torch.empty", "_absent"),
    Rule("stride of one row not looked at", r"tensor\.stride\(-2\)", "H", "_rows"),
    Rule("reference in the dtype of x", r"compute = _unless_float64\(.+\)", "compute = x.dtype", "reference"),
    Rule("reference in the layout of x", r"\.contiguous\(\)", "", "_formula"),
    Rule("statistics of the reference with gradient", r"\.detach\(\)", "", "reference"),
    Rule("unwanted gradient made", r" if needs\[\d\] else None", "", "_empty_gradients"),
    Rule("saved tensor copied", r"save_for_backward\((\w+)", r"save_for_backward(\1.clone()", "_Autograd"),
    Rule("second derivatives let through", r"_gradients_once if .+ else ", "", "_Autograd"),
    Rule("dtype of x not looked at", r"^if dtype not in _DTYPES:", "if False:", "_check"),
    Rule("shapes and dtypes not looked at", r"^if \w+\.shape != .+:", "if False:", "_check"),
    Rule("eps not looked at", r"^if not 2\.0\*\*-126 .+:", "if False:", "_check"),
)

RULES = (
    *PRECISION,
    *EPS,
    *ADDRESSES,
    *DENOMINATORS,
    *MASKS,
    *STORES,
    *STATISTICS,
    *ROUNDINGS,
    *GRADIENTS,
    *SUMS,
    *EXCHANGE,
    *HOST,
)
