"""A package of a policy as LeRobot finds them: by its name. Importing it registers the configuration and the step."""

from .configuration_drift import DriftConfig as DriftConfig
from .processor_drift import Halved as Halved
