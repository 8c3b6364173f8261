#include "sinks/rabbitmq/rabbitmq_sink.hpp"

RETRYSAFE_SINK(retrysafe::rabbitmq::RabbitmqSink, "rabbitmq", 0)
