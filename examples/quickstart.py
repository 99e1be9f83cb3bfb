"""Learn the digits 0-4, discover 5-9 without a label; about a minute on a CPU."""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import ncdwf

images, labels = (load_digits().images * 15).astype("uint8"), load_digits().target.astype(str)
X, X_test, y, y_test = train_test_split(images, labels, random_state=0)

finder = ncdwf.NovelClassDiscoverer(num_novel=5)
finder.fit(X[y < "5"], y[y < "5"])  # 0-4; from here on no labelled picture is needed
finder.discover(X[y >= "5"])  # pictures of 5-9, without labels

print(y_test[:6], finder.predict(X_test[:6]), finder.predict_proba(X_test[:6]).max(1), sep="\n")
print("accuracy:", finder.score(X_test, y_test))
