"""Plans for distributed training, from the execution order of a trace.

    plan = st.distributed.plan(model, tr.order, classes=torch.nn.Linear)

Each process calls `plan.apply(mesh)`.
"""

from scopetrace.distributed.pipeline import Cut as Cut
from scopetrace.distributed.pipeline import SplitPoints as SplitPoints
from scopetrace.distributed.pipeline import split_points as split_points
from scopetrace.distributed.planning import Plan as Plan
from scopetrace.distributed.planning import ShardGroup as ShardGroup
from scopetrace.distributed.planning import check_order as check_order
from scopetrace.distributed.planning import plan as plan
from scopetrace.distributed.simulation import Simulation as Simulation
from scopetrace.distributed.simulation import simulate as simulate
