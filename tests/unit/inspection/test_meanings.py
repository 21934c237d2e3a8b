"""Every kind of map says what it is and what it is not."""

from vitlab.inspection.meanings import MEANINGS, meanings_of
from vitlab.inspection.saliency import METHODS


def test_every_method_has_its_words() -> None:
    assert set(MEANINGS) == {*METHODS, "head"}
    for meaning in MEANINGS.values():
        assert meaning.caption.startswith(meaning.what) and meaning.caption.endswith(meaning.is_not)
        assert meaning.title and meaning.is_not.endswith(".")


def test_a_model_without_tokens_has_words_of_its_own() -> None:
    words = meanings_of(has_tokens=False)
    assert set(words) == {*MEANINGS, "unit"} and meanings_of(has_tokens=True) is MEANINGS
    assert "feature map" in words["grad-cam"].caption and "patches" not in words["grad-cam"].caption
    for name, meaning in words.items():
        assert meaning.is_not.endswith(".") and (name == "unit" or meaning.unit == MEANINGS[name].unit)


def test_class_is_named_where_a_map_is_about_one() -> None:
    named = {name for name, meaning in MEANINGS.items() if "that of a bee." in meaning.caption_for("a bee")}
    assert named == {"gradient-rollout", "grad-cam", "integrated-gradients"}
    assert "no classes" in MEANINGS["grad-cam"].caption_for(None)
    assert MEANINGS["rollout"].caption_for("a bee") == MEANINGS["rollout"].caption


def test_integrated_gradients_name_the_image_that_they_start_from() -> None:
    assert "blurred" in MEANINGS["integrated-gradients"].what  # the baseline that saliency() takes
