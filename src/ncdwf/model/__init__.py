"""What is learnt: backbones, heads, identifier, class statistics and the model they make up."""

from ncdwf.model.model import Architecture, Model, NovelHead, Outputs, Prediction

__all__ = ["Architecture", "Model", "NovelHead", "Outputs", "Prediction"]
