"""Parameters to the unit and multiply-adds to 0.1 %, against the published numbers and against what torch counts."""

import os

import pytest
import torch
from slow_cases import slow_after
from torch.utils.flop_counter import FlopCounterMode

from vitlab.models.build import allocate
from vitlab.models.cost import count_macs, count_params, training_exaflops
from vitlab.models.facts import model_info
from vitlab.models.names import list_models, parse_name, with_size
from vitlab.models.spec import changed

# name -> (image size, parameters, GMACs as printed in the sources). K = 1000.
PUBLISHED = [
    ("ViT-Ti/16", 224, 5_717_416, "1.254"),
    ("ViT-Ti/16", 384, 5_790_376, "4.682"),
    ("ViT-S/32", 224, 22_878_952, "1.143"),
    ("ViT-S/32", 384, 22_915_432, "3.443"),
    ("ViT-S/16", 224, 22_050_664, "4.599"),
    ("ViT-S/16", 384, 22_196_584, "15.490"),
    ("ViT-B/32", 224, 88_224_232, "4.409"),
    ("ViT-B/32", 384, 88_297_192, "13.044"),
    ("ViT-B/16", 224, 86_567_656, "17.564"),
    ("ViT-B/16", 384, 86_859_496, "55.484"),
    ("ViT-B/8", 224, 86_576_872, "78.148"),
    ("ViT-B/8", 384, 87_744_232, "294.04"),
    ("ViT-L/32", 224, 306_535_400, "15.378"),
    ("ViT-L/32", 384, 306_632_680, "45.276"),
    ("ViT-L/16", 224, 304_326_632, "61.555"),
    ("ViT-L/16", 384, 304_715_752, "191.07"),
    ("ViT-L/16", 512, 305_174_504, "361.99"),
    ("ViT-H/14", 224, 632_045_800, "167.295"),
    ("ViT-H/14", 518, 633_470_440, "1016.7"),
    ("R50+ViT-B/16", 224, 98_659_112, "21.54"),
    ("R50+ViT-B/16", 384, 98_950_952, "67.16"),
    ("R50+ViT-B/32", 224, 110_945_832, "8.46"),
    ("R50+ViT-B/32", 384, 111_018_792, "24.94"),
    ("R50+ViT-L/16", 224, 316_483_624, "65.54"),
    ("R50+ViT-L/16", 384, 316_872_744, "202.8"),
    ("R50+ViT-L/32", 224, 328_994_856, "19.41"),
    ("R50+ViT-L/32", 384, 329_092_136, "57.14"),
    ("R26+ViT-B/32", 224, 101_383_976, "6.71"),
    ("R26+ViT-B/32", 384, 101_456_936, "19.81"),
    ("R26+ViT-S/32", 224, 36_431_912, "3.46"),
    ("R26+ViT-S/32", 384, 36_468_392, "10.26"),
    ("R+ViT-Ti/16", 224, 6_337_704, "0.434"),
    ("R+ViT-Ti/16", 384, 6_355_944, "1.327"),
    ("BiT-R26x1", 224, 15_987_496, "2.342"),
    ("BiT-R50x1", 224, 25_549_352, "4.089"),
    ("BiT-R50x2", 224, 97_988_712, "16.117"),
    ("BiT-R50x3", 224, 217_319_080, "36.082"),
    ("BiT-R101x1", 224, 44_541_480, "7.801"),
    ("BiT-R101x3", 224, 387_934_888, "69.492"),
    ("BiT-R152x1", 224, 60_185_128, "11.514"),
    ("BiT-R152x2", 224, 236_335_208, "45.814"),
    ("BiT-R152x4", 224, 936_533_224, "182.78"),
    ("BiT-R152x4", 384, 936_533_224, "537"),
    ("BiT-R152x4", 480, 936_533_224, "839"),
    ("BiT-R200x3", 224, 568_633_000, "134.35"),
    # Parameters: timm's and the authors' counts; GMACs: convolutions and the head alone, at each size's own resolution.
    ("EfficientNet-B0", 224, 5_288_548, "0.386"),
    ("EfficientNet-B1", 240, 7_794_184, "0.687"),
    ("EfficientNet-B2", 260, 9_109_994, "0.994"),
    ("EfficientNet-B3", 300, 12_233_232, "1.827"),
    ("EfficientNet-B4", 380, 19_341_616, "4.394"),
    ("EfficientNet-B5", 456, 30_389_784, "10.27"),
    ("EfficientNet-B6", 528, 43_040_704, "19.07"),
    ("EfficientNet-B7", 600, 66_347_960, "37.75"),
    ("EfficientNet-L2", 800, 480_309_308, "475.7"),
    ("EfficientNet-L2", 475, 480_309_308, "170.9"),
    ("Axial-ViT-B/16", 224, 171_620_584, "33.51"),
    ("Axial-ViT-B/32", 224, 173_277_160, "8.45"),
]

# Counted here, since no source has them for this definition; Axial-DeepLab's authors print 5.9M for AxialResNet-26-S.
COUNTED = [
    ("AxialResNet-26-S", 224, 5_944_936, "1.812"),
    ("AxialResNet-50-S", 224, 11_586_216, "2.843"),
    ("AxialResNet-50-M", 224, 25_179_400, "5.955"),
    ("AxialResNet-50-L", 224, 43_973_480, "10.194"),
    ("BiT-R50x1+NL", 224, 32_907_816, "5.561"),
]


@pytest.mark.parametrize(("name", "size", "params", "gmacs"), [*PUBLISHED, *COUNTED])
def test_published_counts(name: str, size: int, params: int, gmacs: str) -> None:
    info = model_info(name, image_size=size)
    assert info.params == params
    # 0.1 %, or half a unit of the last printed digit where the source rounded harder than that.
    digits = len(gmacs.partition(".")[2])
    assert info.macs / 1e9 == pytest.approx(float(gmacs), rel=1e-3, abs=0.5 * 10**-digits + 1e-9)


@pytest.mark.parametrize(
    ("name", "changes", "params"),
    [
        ("ViT-S/16", {"pool": "gap"}, 22_049_896),
        ("ViT-B/16", {"pool": "gap"}, 86_566_120),
        ("ViT-B/32", {"pool": "gap"}, 88_222_696),
        ("ViT-S/32", {"pool": "gap"}, 22_878_184),
        ("ViT-B/16", {"num_classes": 0}, 85_798_656),
        ("ViT-L/16", {"num_classes": 0}, 303_301_632),
        ("ViT-H/14", {"num_classes": 0}, 630_764_800),
        ("ViT-B/16", {"num_classes": 21_843, "head": "mlp-tanh"}, 103_186_515),
        ("ViT-B/32", {"num_classes": 21_843, "head": "mlp-tanh"}, 104_843_091),
        ("ViT-L/16", {"num_classes": 21_843, "head": "mlp-tanh"}, 326_740_307),
        ("ViT-L/32", {"num_classes": 21_843, "head": "mlp-tanh"}, 328_949_075),
        ("ViT-H/14", {"num_classes": 21_843, "head": "mlp-tanh"}, 660_385_363),
    ],
)
def test_published_counts_of_other_heads(name: str, changes: dict[str, object], params: int) -> None:
    assert count_params(changed(parse_name(name), changes)) == params


# One of each kind and of each odd part; tests/property/test_cost.py draws others, and `make soak` counts every name.
SAMPLE = ["ViT-S/16", "R+ViT-Ti/16", "BiT-R26x1", "EfficientNet-B1", "ViT-H/14", "R50+ViT-B/16", "BiT-R50x3"]
SAMPLE += ["Axial-ViT-B/32", "BiT-R50x1+NL", "AxialResNet-50-M"]
SOAK = os.environ.get("VITLAB_SOAK") == "1"


@pytest.mark.parametrize("name", list_models() if SOAK else slow_after(4, SAMPLE))
def test_closed_form_equals_what_torch_counts(name: str) -> None:
    spec = parse_name(name)
    model = allocate(spec).eval().requires_grad_(False)
    assert sum(p.numel() for p in model.parameters()) == count_params(spec)
    with FlopCounterMode(display=False) as counter:
        model(torch.empty(1, spec.in_channels, *spec.image_size, device="meta"))
    assert counter.get_total_flops() == 2 * count_macs(spec)


@pytest.mark.parametrize(
    ("name", "gmacs"),
    [
        ("BiT-R50x1", 3.984),
        ("BiT-R50x2", 15.627),
        ("BiT-R101x1", 7.513),
        ("BiT-R152x1", 11.064),
        ("BiT-R152x2", 43.948),
        ("BiT-R200x3", 129.32),
    ],
)
def test_macs_without_padding_taps_at_jft_classes(name: str, gmacs: float) -> None:
    spec = with_size(parse_name(name), num_classes=18_291)
    assert count_macs(spec, padding_taps=False) / 1e9 == pytest.approx(gmacs, rel=1e-3)


# The paper's Table 6: pre-training compute in exaFLOPs on JFT-300M (18,291 classes). The last column is how far the formula
# may be off; R50+ViT-L/16 at 7 epochs is printed 3 % above half of its own 14-epoch row, and B/32 is 2.3 % off.
TABLE_6 = [
    ("ViT-B/16", 7, 224, 0.01),
    ("ViT-L/32", 7, 196, 0.01),
    ("ViT-L/16", 7, 783, 0.01),
    ("ViT-L/16", 14, 1567, 0.01),
    ("ViT-H/14", 14, 4262, 0.01),
    ("ViT-B/32", 7, 55, 0.03),
    ("BiT-R50x1", 7, 50, 0.015),
    ("BiT-R50x2", 7, 199, 0.01),
    ("BiT-R101x1", 7, 96, 0.01),
    ("BiT-R152x1", 7, 141, 0.01),
    ("BiT-R152x2", 7, 563, 0.01),
    ("BiT-R152x2", 14, 1126, 0.01),
    ("BiT-R200x3", 14, 3306, 0.01),
    ("R50+ViT-B/32", 7, 106, 0.01),
    ("R50+ViT-B/16", 7, 274, 0.01),
    ("R50+ViT-L/32", 7, 246, 0.01),
    ("R50+ViT-L/16", 7, 859, 0.035),
    ("R50+ViT-L/16", 14, 1668, 0.01),
]


@pytest.mark.parametrize(("name", "epochs", "exaflops", "tolerance"), TABLE_6)
def test_table_6_compute(name: str, epochs: int, exaflops: float, tolerance: float) -> None:
    spec = with_size(parse_name(name), num_classes=18_291)
    assert training_exaflops(spec, epochs) == pytest.approx(exaflops, rel=tolerance)
