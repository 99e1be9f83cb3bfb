"""From two folders of pictures to named classes and an ONNX file; 20 seconds on a CPU.

Scikit-learn's digits stand for your own pictures: 0-4 are sorted into one folder a class below
`birds/`, 5-9 lie in `unsorted/`.
"""

import importlib.util
import json
import tempfile
from collections import Counter
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

import ncdwf
from ncdwf.data.folder import labelled_folder, unlabelled
from ncdwf.data.gathering import decode

# Fewer epochs than would follow from the data, so that this is over soon.
SHORT = {"supervised.optim.epochs": 10, "discovery.optim.epochs": 20}


def write_pictures(folder: Path, num_pictures: int = 1000) -> None:
    """Write digits as PNG files; the names of those in `unsorted/` begin with what they show."""
    digits = load_digits()
    for number in range(num_pictures):
        digit = int(digits.target[number])
        place = folder / f"birds/{digit}" if digit < 5 else folder / "unsorted"
        place.mkdir(parents=True, exist_ok=True)
        grey = (digits.images[number] * 15.9).astype("uint8")
        Image.fromarray(grey).save(place / f"{digit}-{number}.png")


def main(folder: Path) -> None:
    """Learn, discover, name, save and export."""
    known = labelled_folder(folder / "birds")
    finder = ncdwf.NovelClassDiscoverer(num_novel=5, settings=SHORT)
    finder.fit(known.paths, known.labels)
    print("known:", *finder.classes_)

    pool = unlabelled([folder / "unsorted"])  # `birds/` could be deleted now
    finder.discover(pool.paths)
    discovered = finder.classes_[~finder.named_]
    print("discovered:", *discovered)

    # Look at some pictures of every class; here the names of the files say what is on them.
    answers, names = finder.predict(pool.paths), {}
    for name in discovered:
        paths = [path for path, answer in zip(pool.paths, answers, strict=True) if answer == name]
        shown = Counter(path.name[0] for path in paths)
        print(f"{name}: {len(paths)} pictures, such as {paths[0].name}; on them: {dict(shown)}")
        names[name] = f"{shown.most_common(1)[0][0]} ({name})"
    finder.rename(names)
    finder.save(folder / "both")
    print("saved:", *sorted(path.name for path in (folder / "both").iterdir()))

    if importlib.util.find_spec("onnxruntime") is None:
        print("no ONNX file: pip install 'ncdwf[onnx]'")
        return
    import onnxruntime

    ncdwf.export_onnx(finder.model_, folder / "birds.onnx")
    session = onnxruntime.InferenceSession(folder / "birds.onnx")
    classes = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    images = decode(pool.paths[:3], finder.model_.architecture.input_shape).images.numpy()
    probabilities, novelty = session.run(None, {"images": images})
    for path, row, share in zip(pool.paths, probabilities, novelty, strict=False):
        print(f"{path.name}: {classes[row.argmax()]}, P(novel) {share:.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        write_pictures(Path(name))
        main(Path(name))
