/* exponent.h: p * 2**n for sets without such an instruction: the exponent field of 2**n is built by an addition.
 * Right for -126 <= n <= 127 (-1022 <= n <= 1023); a NaN in p stays NaN whatever n holds. */

INLINE vf vf_scale2(vf p, vf n) { return p * (vf)((vfi)(n + (0x1.8p23f + 127.0f)) << 23); }
INLINE vd vd_scale2(vd p, vd n) { return p * (vd)((vdi)(n + (0x1.8p52 + 1023.0)) << 52); }
