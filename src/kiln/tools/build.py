"""The toolbox that the settings describe."""

from __future__ import annotations

from kiln.core.settings import Settings
from kiln.tools.arithmetic import CalcArithmetic
from kiln.tools.clock import DateTime
from kiln.tools.policy import Policy
from kiln.tools.tool import ServerTool
from kiln.tools.toolbox import Toolbox
from kiln.tools.units import ConvertUnits


def toolbox_from(settings: Settings) -> Toolbox:
    """All tools that are set up, under the policy of the settings. Starts and reaches nothing."""
    tools: list[ServerTool] = [CalcArithmetic(), DateTime(), ConvertUnits()]
    configured = settings.tools
    return Toolbox(
        tools,
        policy=Policy(configured.allow, configured.deny),
        timeout_s=configured.timeout_s,
        max_output_chars=configured.max_output_chars,
    )
