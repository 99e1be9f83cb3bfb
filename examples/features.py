"""Vectors instead of pictures: a digit is 64 numbers, 0-4 have labels; 12 to 15 seconds on a CPU.

Tables of measurements and the features of another network are given in the same way.
"""

import tempfile

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import ncdwf

X, y = load_digits(return_X_y=True)
X, X_test, y, y_test = train_test_split(X, y, test_size=0.3, stratify=y, random_state=0)
has_label = y < 5

finder = ncdwf.NovelClassDiscoverer(num_novel=5, random_state=0)
finder.fit(X[has_label], y[has_label])
pool = X[~has_label]  # from here on nothing labelled is needed
finder.discover(pool)
print("classes:", finder.classes_, "of which nobody has named", finder.classes_[~finder.named_])
print(f"accuracy, discovered classes matched to digits: {finder.score(X_test, y_test):.3f}")

# Somebody looks at the members of every discovered class and says what they are.
answers, seen = finder.predict(pool), y[~has_label]
names = {found: np.bincount(seen[answers == found]).argmax() for found in (5, 6, 7, 8, 9)}
finder.rename(names)
print("classes:", finder.classes_)
print(f"accuracy by these names: {finder.score(X_test, y_test):.3f}")

with tempfile.TemporaryDirectory() as folder:
    finder.save(folder)
    again = ncdwf.NovelClassDiscoverer.load(folder)
print("loaded, same answers:", np.array_equal(again.predict(X_test), finder.predict(X_test)))
