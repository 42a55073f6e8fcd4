/* te_compile: FP8 casts, scale updates and matrix products, for any framework.
 *
 * A plain C interface over raw pointers and streams: no tensor class, no framework headers, no global set-up. Every
 * function returns a te_status; te_last_error() says in words what went wrong in the calling thread.
 *
 * Conventions, the same on host and device:
 *   - A matrix is row-major. Sizes and leading dimensions count elements.
 *   - A scale multiplies the high-precision value before the cast; a scale_inv multiplies the FP8 value after it.
 *   - The cast is saturate(x * scale) rounded to nearest even, and NaN where x is NaN or infinite.
 *   - amax is the largest magnitude of the input, and infinite if any element is NaN or infinite.
 *   - Device functions only enqueue work on `stream` (a cudaStream_t) of `device`; they never synchronise, except that
 *     te_cublaslt_gemm times candidate algorithms once per new shape, and never while the stream is being captured
 *     (te_cublaslt_keep_choices spares later processes that).
 *
 * All functions are thread-safe. Those named te_cuda_* and te_cublaslt_* return TE_NOT_BUILT in a build without CUDA.
 */
#ifndef TE_COMPILE_H
#define TE_COMPILE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum te_status {
  TE_OK = 0,
  TE_INVALID_ARGUMENT = 1, /* the call can never work: a null pointer, a negative size, an unknown dtype */
  TE_UNSUPPORTED = 2,      /* a sound request that this device or library cannot serve: take another implementation */
  TE_NOT_BUILT = 3,        /* this build has no CUDA part */
  TE_CUDA_ERROR = 4,
  TE_CUBLAS_ERROR = 5
} te_status;

typedef enum te_dtype {
  TE_FLOAT32 = 0,
  TE_FLOAT16 = 1,
  TE_BFLOAT16 = 2,
  TE_FLOAT8_E4M3 = 3, /* finite only ("fn"): largest 448, one NaN per sign */
  TE_FLOAT8_E5M2 = 4  /* largest 57344 */
} te_dtype;

/* How an amax becomes a scale:
 *   clamp(fp8_max * 2^-margin / max(amax, epsilon), smallest normal, largest finite); 1 if amax is 0 or not finite.
 * power_2 rounds the result down to a power of two. */
typedef struct te_scale_rule {
  float fp8_max;
  int32_t margin;
  float epsilon;
  int32_t power_2;
} te_scale_rule;

/* Which amax of the history stands for the next step. */
typedef enum te_amax_algorithm { TE_AMAX_MAX = 0, TE_AMAX_MOST_RECENT = 1 } te_amax_algorithm;

/* What went wrong in the last call of this thread that did not return TE_OK. Never null. */
const char* te_last_error(void);

/* ------------------------------------------------------------------------------------------------------------ host */

/* q[i] = cast(x[i] * scale) for i < count; *amax, if not null, becomes the amax of x. */
te_status te_host_quantize(const float* x, int64_t count, float scale, te_dtype dtype, uint8_t* q, float* amax);

/* y[i] = value(q[i]) * scale_inv for i < count. */
te_status te_host_dequantize(const uint8_t* q, int64_t count, float scale_inv, te_dtype dtype, float* y);

/* *scale = the rule applied to amax. */
te_status te_host_scale(float amax, const te_scale_rule* rule, float* scale);

/* One delayed-scaling step for `count` states. states[i]: rows[i] rows of 2 + history_length floats,
 *     scale | number of skipped steps | history of amaxes, newest first
 * and amaxes[i]: rows[i] floats. Row by row: an amax that is not finite is counted as skipped and changes nothing else;
 * an amax of 0 changes nothing; any other enters the history and gives a new scale. */
te_status te_host_update_scales(float* const* states, const float* const* amaxes, const int64_t* rows, int64_t count,
                                int64_t history_length, const te_scale_rule* rule, te_amax_algorithm algorithm);

/* ------------------------------------------------------------------------------------------------------------ CUDA */

/* 1 if the CUDA part was built, else 0. */
int te_cuda_built(void);

/* FP8 codes of x [rows, columns] (TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16), in one pass over x.
 *
 *   q         [rows, columns], or null
 *   qt        [columns, rows rounded up to 16], the added columns zero, or null
 *   amax      one float, written
 *   scale_inv one float, written, or null
 *   scale     one float on the device, or null. Null (current scaling) or a value of 0 (nothing measured yet) takes the
 *             scale from this call's own amax by `rule`
 *   measure   nonzero if that may be needed: one more kernel, which exits at once where the scale is known. */
te_status te_cuda_quantize(int device, const void* x, te_dtype x_dtype, int64_t rows, int64_t columns,
                           const float* scale, int measure, const te_scale_rule* rule, te_dtype dtype, uint8_t* q,
                           uint8_t* qt, float* amax, float* scale_inv, void* stream);

#define TE_NORM_FEW_ROWS 16 /* up to which a norm without qt has a kernel of its own */

/* y = norm(x), in fp32 but rounded to x's dtype, and the FP8 (TE_FLOAT8_E4M3) codes of y, reading x once.
 *
 *   centre 1  (x - mean) * rstd * weight + bias         mean, rstd = 1 / sqrt(variance + eps) of each row
 *   centre 0  x * rstd * (weight + weight_offset)       rstd = 1 / sqrt(mean of squares + eps) of each row
 *   round_first 1: x * rstd is rounded to x's dtype before the weight meets it (centre 0 only)
 *
 * x: [rows, columns], TE_FLOAT16 or TE_BFLOAT16, aligned to 16 bytes; columns, and the stride from row to row, multiples
 * of 8; at most 16384 columns; compute capability 9.0 or newer with 210 KB of shared memory a block, which desktop
 * Blackwell has not. q, qt, scale, rule and measure are te_cuda_quantize's; few rows without qt take one kernel even where
 * they must be measured. */
typedef struct te_norm {
  int32_t device;
  const void* x;
  te_dtype x_dtype;
  int64_t rows, columns, stride;
  const void* weight; /* [columns] of TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16, or null */
  te_dtype weight_dtype;
  float weight_offset;
  const void* bias; /* as weight */
  te_dtype bias_dtype;
  int32_t centre, round_first;
  float eps;
  const float* scale; /* device, or null */
  int32_t measure;
  te_scale_rule rule;
  void* y;          /* [rows, columns] of x's dtype, or null */
  uint8_t* q;       /* or null */
  uint8_t* qt;      /* aligned to 16 bytes, or null */
  float* amax;      /* one float: of few rows without qt written, else one that holds 0, raised: clearing hundreds at a time
                       costs as much as clearing one */
  float* scale_inv; /* one float, written */
  float* mean;      /* [rows], written if centre */
  float* rstd;      /* [rows], written */
  void* stream;
} te_norm;

te_status te_cuda_norm_quantize(const te_norm* norm);

/* A tensor [batches, length, heads, width] whose features lie side by side: strides count elements. Aligned to 16 bytes,
 * strides positive multiples of 8. */
typedef struct te_heads {
  const void* x;
  int64_t batch, row, head;
} te_heads;

/* Scaled dot-product attention, with bits that say what weights to keep or without, forward and backward, in 16 bits with
 * fp32 sums:
 *
 *   p = softmax(scale * q k^T)        z = kept ? growth : 0        out = (p z) v        logsumexp of each row of logits
 *   ds = p (z (dout v^T) - sum(dout out)) scale      dq = ds k      dk = ds^T q      dv = (p z)^T dout
 *
 * bits: [batches * heads, bit_words, bit_queries] words, at least 2 ceil(keys / 64) of them for each of at least `queries`;
 * of key 64 b + 8 j + 2 l + e (j < 8, l < 4, e < 2) bit 16 (l % 2) + 8 e + j of word 2 b + l / 2. Null keeps every weight;
 * growth must be 1 then, and heads a multiple of key_heads: as many of queries in a row read the same keys and values.
 * Otherwise there are as many of both. width: a multiple of 8 up to 128. left, right: how many keys before its own place, and
 * after it, a query sees; below 0 all. If not all there are as many keys as queries, and bits only with right 0 and left
 * below 0. Compute capability 9.0.
 *
 * mask: which keys a query sees, where left and right are below 0; null for all. In words of 32 bits, from the
 * lowest: forward those of keys, [mask_batches, queries, 4 ceil(keys / 128)], and backward those of queries, [mask_batches,
 * keys, 2 ceil(queries / 64)]; mask_batches is 1 or batches. tiles: which tiles are not hidden altogether, forward a list
 * for each 128 queries, of tiles of 128 keys, [mask_batches, ceil(queries / 128), 1 + ceil(keys / 128)], and backward one for
 * each 128 keys, of 64 queries, [mask_batches, ceil(keys / 128), 1 + ceil(queries / 64)]: how many follow, at least one, and
 * of each twice its number, and one more if the mask must be read there, as it must be where a tile ends behind the last key.
 *
 * bias: [bias_batches, bias_heads, queries, bias_row], what is added to scale * q k^T before the softmax, of the operands'
 * dtype; null for nothing. bias_batches is 1 or batches, bias_heads 1 or heads, and bias_row at least keys, a multiple of 8.
 * With one there is no mask, and left and right are below 0. A query all of whose scores are
 * below -1e30 has a logsumexp of minus infinity and no gradients. Backward ds, if it is not null, becomes the gradient of what
 * is added, [batches, heads, keys, ds_row], of the operands' dtype: ds without scale. ds_row is at least queries, a multiple
 * of 8; what lies behind the last query is left alone.
 *
 * The backward pass reads what the forward pass wrote, and overwrites batches * heads * queries * (w + 2) floats of
 * workspace, queries rounded up to a multiple of 64 and w, the width, to 64 or 128. It reads bits by whole tiles: bit_words
 * must be a multiple of 4, bit_queries of 64. It adds up dq in the order in which blocks come: its last bits may differ from run to run. */
typedef struct te_attention {
  int32_t device;
  te_dtype dtype; /* of q, k, v, out, grad, dq, dk and dv: TE_FLOAT16 or TE_BFLOAT16 */
  int64_t left, right;
  int64_t batches, heads, key_heads, queries, keys, width;
  float scale, growth;
  te_heads q, k, v;
  const uint32_t* bits;
  int64_t bit_words, bit_queries;
  const uint32_t* mask;
  const int32_t* tiles;
  int64_t mask_batches;
  const void* bias;
  int64_t bias_batches, bias_heads, bias_row;
  void* out;        /* [batches, queries, heads, width], contiguous, as dq; dk and dv: [batches, keys, key_heads, width] */
  float* logsumexp; /* [batches, heads, queries] */
  te_heads grad;    /* of out; this and what follows is for the backward pass */
  float* workspace;
  void *dq, *dk, *dv;
  void* ds;
  int64_t ds_row;
  void* stream;
} te_attention;

te_status te_cuda_attention(const te_attention* task);
te_status te_cuda_attention_backward(const te_attention* task);

/* y[t] = a_scale_inv * b_scale_inv * (a[t] times the transpose of b[e]) for each token t of expert e: those from ends[e - 1],
 * 0 for the first, up to ends[e]. Tokens after the last end get zeros.
 *
 * a [tokens, depth], b [experts, features, depth] with strides in elements: FP8, not both E5M2; depth and strides multiples
 * of 16, features of 4; a, b and y aligned to 16 bytes. Up to 1024 experts. Compute capability 9.0. */
typedef struct te_grouped_gemm {
  int32_t device;
  const void *a, *b;
  te_dtype a_dtype, b_dtype;
  int64_t tokens, features, depth, experts, feature_stride, expert_stride;
  const float *a_scale_inv, *b_scale_inv; /* device */
  const int32_t* ends;                    /* device, [experts], nowhere falling */
  void* y;                                /* [tokens, features] of TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16 */
  te_dtype y_dtype;
  int32_t fast_accumulation; /* as in te_gemm; 0 adds up sums of 128 products in fp32 */
  void* stream;
} te_grouped_gemm;

te_status te_cuda_grouped_gemm(const te_grouped_gemm* task);

/* y[e] = a_scale_inv * b_scale_inv * (a[:, g] times the transpose of b[:, g]), g the tokens of expert e: those from
 * ends[e - 1], 0 for the first, up to ends[e]. Sums of 128 products are added up in fp32.
 *
 * a [rows, tokens], b [columns, tokens]: FP8, not both E5M2; tokens: a multiple of 16, columns of 4; a, b and y aligned to
 * 16 bytes. An expert without tokens gets zeros. Compute capability 9.0. */
typedef struct te_grouped_wgrad {
  int32_t device;
  const void *a, *b;
  te_dtype a_dtype, b_dtype;
  int64_t rows, columns, tokens, experts;
  const float *a_scale_inv, *b_scale_inv; /* device */
  const int32_t* ends;                    /* device, [experts], nowhere falling */
  void* y;                                /* [experts, rows, columns] of TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16 */
  te_dtype y_dtype;
  void* workspace; /* device, 256 bytes for each expert, aligned to 128; overwritten */
  void* stream;
} te_grouped_wgrad;

te_status te_cuda_grouped_wgrad(const te_grouped_wgrad* task);

/* y[i] = a_scale_inv * b_scale_inv[i] * (a times the transpose of b[i]) + addend[i] + bias[i], rounded once, of up to four b in
 * one launch. The order of sums depends on nothing but sizes.
 *
 * a [rows, depth], b [columns, depth]: TE_FLOAT8_E4M3, contiguous, aligned to 16 bytes; depth a multiple of 16. Up to 16 rows.
 * Compute capability 8.9. */
#define TE_SKINNY_PARTS 4
#define TE_SKINNY_ROWS 16

typedef struct te_skinny_part {
  const void* b;
  const float* b_scale_inv; /* device */
  int64_t columns;
  const void* bias; /* [columns] of TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16, or null */
  te_dtype bias_dtype;
  const void* addend; /* [rows, columns] of y's dtype, contiguous, or null; may be y itself */
  void* y;            /* [rows, columns] */
} te_skinny_part;

typedef struct te_skinny_gemm {
  int32_t device;
  const void* a;
  const float* a_scale_inv; /* device */
  int64_t rows, depth;
  int32_t count; /* of parts */
  te_skinny_part parts[TE_SKINNY_PARTS];
  te_dtype y_dtype; /* TE_FLOAT32, TE_FLOAT16 or TE_BFLOAT16 */
  void* stream;
} te_skinny_gemm;

te_status te_cuda_skinny_gemm(const te_skinny_gemm* task);

/* te_host_update_scales for device memory. The lists of pointers themselves are host memory: they travel as kernel
 * parameters, so nothing is copied and the call may be captured in a CUDA graph. */
te_status te_cuda_update_scales(int device, float* const* states, const float* const* amaxes, const int64_t* rows,
                                int64_t count, int64_t history_length, const te_scale_rule* rule,
                                te_amax_algorithm algorithm, void* stream);

/* -------------------------------------------------------------------------------------------------------- cuBLASLt */

typedef enum te_epilogue {
  TE_EPILOGUE_NONE = 0,          /* d = p */
  TE_EPILOGUE_BIAS = 1,          /* d = p + bias */
  TE_EPILOGUE_GELU_AUX = 2,      /* aux = p, d = gelu(p), the tanh form */
  TE_EPILOGUE_GELU_AUX_BIAS = 3, /* aux = p + bias, d = gelu(aux) */
  TE_EPILOGUE_DGELU = 4,         /* d = p * gelu'(aux) */
  TE_EPILOGUE_DGELU_BGRAD = 5    /* d = p * gelu'(aux); bias, written: the sums of the columns of d */
} te_epilogue;

/* p[m, n] = a_scale_inv * b_scale_inv * (a [m, k] times the transpose of b [n, k]); d = epilogue(p + addend).
 *
 * a, b: FP8, not both E5M2; k, lda, ldb multiples of 16, pointers aligned to 16 bytes. d: TE_BFLOAT16, TE_FLOAT16,
 * TE_FLOAT32 or FP8. bias: TE_FLOAT16 with a TE_FLOAT16 d, else TE_BFLOAT16. aux: [m, n]. The scales, too, must start on
 * multiples of 16 bytes, though four are read.
 * d_scale, amax_d: for FP8 d only; d = cast(epilogue(p) * *d_scale), *amax_d = max |epilogue(p)| as the library
 * measures it, or null. */
typedef struct te_gemm {
  int32_t device;
  const void* a;
  const void* b;
  void* d;
  const float* a_scale_inv; /* device */
  const float* b_scale_inv; /* device */
  const float* d_scale;     /* device, or null */
  float* amax_d;            /* device, or null */
  void* bias;               /* read by BIAS epilogues, written by BGRAD, else null */
  void* aux;                /* written by GELU_AUX epilogues, read by DGELU, else null */
  const void* addend;       /* [m, n] of d's dtype, not FP8, added before the epilogue; may be d itself; or null */
  int64_t m, n, k;
  int64_t lda, ldb, ldd, ld_aux, ld_addend;
  te_dtype a_dtype, b_dtype, d_dtype, bias_dtype, aux_dtype;
  te_epilogue epilogue;
  int32_t fast_accumulation; /* 1: the tensor core's own accumulator; 0: partial sums promoted to fp32 */
  void* workspace;           /* device, aligned to 256 bytes; null: one owned per device and stream is used */
  size_t workspace_bytes;    /* at least 32 MiB is advised on Hopper; ignored if workspace is null */
  int32_t candidates;        /* time this many of the library's suggestions; 1 takes the first, without timing */
  void* stream;
} te_gemm;

/* Enqueue the product. The plan (descriptors and algorithm) is kept and reused for all calls that differ only in
 * pointers of equal alignment. */
te_status te_cublaslt_gemm(const te_gemm* gemm);

/* A product that is made again and again, with other pointers each time: what it is has been looked at once. */
typedef struct te_prepared_gemm te_prepared_gemm;

/* Prepare products like this one; te_cublaslt_release gives back what it makes. Nothing runs. */
te_status te_cublaslt_prepare(const te_gemm* gemm, te_prepared_gemm** prepared);

/* te_cublaslt_gemm(gemm), which must be what was prepared in all but its pointers and its stream, and a pointer that was
 * null must be null again. May be called by several threads at a time. */
te_status te_cublaslt_run(te_prepared_gemm* prepared, const te_gemm* gemm);

void te_cublaslt_release(te_prepared_gemm* prepared);

/* TE_OK if te_cublaslt_gemm would find an algorithm on this device. Pointers are looked at for alignment and for being
 * null, never followed; nothing runs. */
te_status te_cublaslt_check(const te_gemm* gemm);

/* The version of the cuBLASLt library in use, e.g. 130100, loading it if need be. The one that the process has loaded
 * already is preferred, so that a framework and we share one. */
te_status te_cublaslt_version(size_t* version);

/* Keep the algorithms that are chosen for products on `device` in the file `path`, and for plans yet to be made choose
 * those that it holds, without timing. Null, as at first: no longer.
 *
 * Any number of processes may use one file at a time, and come to the same choices; it should be one for each kind of
 * device, version of cuBLASLt and TE_CHOICES_FORMAT. Where it cannot be read or written things are as without it. The
 * folder must exist. Products with 1 candidate neither read nor write it. */
te_status te_cublaslt_keep_choices(int device, const char* path);

/* What a line of such a file means; changes with it. */
#define TE_CHOICES_FORMAT 2

/* How many plans are kept, and for how many of them this process timed algorithms. */
te_status te_cublaslt_plans(int64_t* kept, int64_t* timed);

#ifdef __cplusplus
}
#endif

#endif
