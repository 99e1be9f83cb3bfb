"""What is learnt: backbones, heads, identifier, class statistics and the model they make up."""

from ncdwf.model.architecture import Architecture, NovelHead
from ncdwf.model.model import Model, Outputs, Prediction

__all__ = ["Architecture", "Model", "NovelHead", "Outputs", "Prediction"]
