"""The methods that are compared, by their specs and by the names that their papers give them."""

import re
from collections.abc import Mapping

SPECS = (
    "exact",
    "fp16",
    "bf16",
    "int8",
    "int8:rounding=stochastic",
    "sign",
    "one_bit",
    "terngrad",
    "qsgd:levels=1",
    "qsgd:levels=4",
    "dithered:levels=1",
    "dithered:levels=4",
    "dithered:levels=1,mode=half",
    "dithered:mode=one_bit",
    "ecsq:step=1",
    "nested_dithered:levels=3,ratio=3",
    "nested_dithered:levels=3,ratio=7",
    "lloyd_max:levels=2",
    "lloyd_max:levels=4",
    "qcs",
    "top_k:k=0.01",
    "top_k:k=0.01,values=float16",
    "rtop_k:r=0.04,k=0.01",
    "random_k:k=0.05",
    "eus:m=0.01",
    "error_feedback(top_k:k=0.01)",
    "error_feedback(sign)",
    "momentum_correction(top_k:k=0.01)",
    "separate(dithered:levels=1,bucket=row)",
    "separate(dithered:levels=4,bucket=row)",
    "naive:levels=2",
    "minimum_variance:levels=2",
    "minimum_variance_unbiased:levels=2",
    "balanced",
    "rotated",
    "rotated:mode=mmse,nmse=0.085",
)
"""What is measured by default: every registered codec at least once, but schedules, which only choose others, and
``subspace``, which all ranks make together."""

NAMES: Mapping[str, str] = {
    "dense": "uncompressed",
    "isgq": "dithered ISGQ (Abdi and Fekri 2020)",
    "exact": "lossless",
    "fp16": "float16 cast",
    "bf16": "bfloat16 cast",
    "int8": "blockwise absmax int8",
    "sign": "signSGD (Bernstein et al. 2018)",
    "one_bit": "1-bit SGD (Seide et al. 2014)",
    "terngrad": "TernGrad (Wen et al. 2017)",
    "qsgd": "QSGD (Alistarh et al. 2017)",
    "dithered": "DQSG, dithered quantization (Abdi and Fekri 2019)",
    "ecsq": "ECSQ, entropy-coded scalar quantization (Zamir and Feder 1992)",
    "nested_dithered": "NDQSG, nested dithered quantization (Abdi and Fekri 2019)",
    "lloyd_max": "Lloyd-Max quantization (Max 1960, Lloyd 1982)",
    "qcs": "QCS, quantized compressive sampling (Abdi and Fekri 2020)",
    "top_k": "top-k (Strom 2015, Aji and Heafield 2017)",
    "rtop_k": "rTop-k (Barnes et al. 2020)",
    "random_k": "random-k (Konečný et al. 2016)",
    "eus": "EUS, efficient unbiased sparsification (Barnes et al. 2024)",
    "error_feedback": "error feedback (Seide et al. 2014, Stich et al. 2018)",
    "momentum_correction": "momentum correction of DGC (Lin et al. 2018)",
    "separate": "ISGQ, one quantizer a factor (Abdi and Fekri 2020)",
    "naive": "ISGQ, naive (Abdi and Fekri 2020)",
    "minimum_variance": "ISGQ, minimum variance, MV (Abdi and Fekri 2020)",
    "minimum_variance_unbiased": "ISGQ, minimum variance unbiased, MVU (Abdi and Fekri 2020)",
    "balanced": "balanced factors (isgq)",
    "rotated": "rotated factors (isgq)",
    "subspace": "common subspace (isgq)",
}


def name_of(spec: str) -> str:
    """What the papers call the codec of a spec, with what it is applied to, if that is another one.

    A codec that has no entry is called by its own name.
    """
    outer, *inner = re.findall(r"[a-z]\w*(?=[(:;),]|$)", re.sub(r":[^();]*", "", spec))
    name = NAMES.get(outer, outer)
    applied = " and ".join(NAMES.get(each, each).partition(" (")[0] for each in dict.fromkeys(inner))
    return f"{name} with {applied}" if applied else name
