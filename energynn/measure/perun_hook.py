# perun executes this file in each rank before it monitors anything (`perun monitor
# --live-callback-files`). It must stay this small: perun runs it with exec inside one of its
# functions, where new functions see no globals.
import energynn.measure.perun_adapter

energynn.measure.perun_adapter.attach_sampler()
