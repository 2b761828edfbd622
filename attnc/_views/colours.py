"""The colours of a weight: one ramp for light and one for dark, even to the eye, also for those who see fewer hues."""

from functools import lru_cache

import numpy as np


@lru_cache(maxsize=2)
def ramp(dark: bool = False) -> np.ndarray:
    """256 colours, uint8 (256, 3), from no weight to the largest: away from the paper, in even steps of lightness.

    Computed in OKLCH (Björn Ottosson, "A perceptual color space for image processing", 2020): lightness runs on a
    straight line and alone tells the weight; hue and chroma only make neighbours easier to tell apart.
    """
    t = np.linspace(0, 1, 256)
    if dark:
        lightness, hue = 0.20 + 0.76 * t, 285 - 190 * t
        chroma = 0.02 + 0.15 * np.sin(np.pi * np.minimum(t * 1.1, 1)) ** 0.8 * (1 - 0.25 * t)
    else:
        lightness, hue = 0.985 - 0.735 * t, 225 + 60 * t
        chroma = 0.006 + 0.105 * np.sin(np.pi * t**0.85) ** 1.15 + 0.03 * t
    return _srgb(lightness, chroma, np.deg2rad(hue))


def _srgb(lightness: np.ndarray, chroma: np.ndarray, hue: np.ndarray) -> np.ndarray:
    """OKLCH to sRGB bytes; what no screen can show is cut at the borders."""
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    lms = np.stack([lightness + 0.3963377774 * a + 0.2158037573 * b,
                    lightness - 0.1055613458 * a - 0.0638541728 * b,
                    lightness - 0.0894841775 * a - 1.2914855480 * b]) ** 3
    linear = np.array([[4.0767416621, -3.3077115913, 0.2309699292],
                       [-1.2684380046, 2.6097574011, -0.3413193965],
                       [-0.0041960863, -0.7034186147, 1.7076147010]]) @ lms
    linear = np.clip(linear, 0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.asarray(np.round(255 * curved), np.uint8).T
