"""Tools that the server runs itself in the middle of an exchange.

An exchange needs three calls of `Toolbox`, made once a server by `build.toolbox_from(settings)`:

    offer = await toolbox.offer(["calc_arithmetic", "files__read"])   # definitions for the template,
    outcome = await toolbox.run(name, arguments)                      # and what was refused, by name
    await toolbox.aclose()                                            # at shutdown

No failure of a tool is raised: every call ends in an `Outcome` with the status done, error or denied.
Whatever a tool returns is data. It is bounded and free of control characters here; that it forges no
turn is the chat template's affair, which shields messages of the role `tool`.
"""
