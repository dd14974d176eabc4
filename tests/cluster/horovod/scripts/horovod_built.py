"""Says where Horovod is, and what is built in."""

import horovod.tensorflow as hvd

from tfrep_strategy.cluster.transports import horovod_transports

print(hvd.__file__, bool(hvd.nccl_built()), bool(hvd.gloo_built()), "/".join(horovod_transports()))
