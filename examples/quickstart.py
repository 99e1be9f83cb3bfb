"""Both phases on the embedded digits in a dozen lines; about half a minute on a CPU."""

import ncdwf

config = ncdwf.recipe("digits-5-5")
split = ncdwf.Setting.parse(config.setting).load()

model = ncdwf.learn_known(split.known_images, split.known_labels, config)
pool = split.novel_images  # from here on no labelled picture is needed
model = ncdwf.discover(model, pool, ncdwf.make_method(config.method), config)

answer = model.predict(split.test_images[:3])
print([model.class_names[label] for label in answer.labels], answer.novelty)
scores, _ = ncdwf.evaluate(model, split)
print(scores.aware, scores.strict[scores.default_rule], sep="\n")
