"""The names of the literature, each a recipe of a few lines."""

from manyhands.catalog.asynchronous import ad_psgd, downpour, hogwild
from manyhands.catalog.pipelines import gpipe, pipedream
from manyhands.catalog.stale import ssp
from manyhands.catalog.synchronous import bsp, bsp_server, easgd

__all__ = ["ad_psgd", "bsp", "bsp_server", "downpour", "easgd", "gpipe", "hogwild", "pipedream", "ssp"]
