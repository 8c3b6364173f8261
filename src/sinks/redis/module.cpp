#include "sinks/redis/redis_sink.hpp"

RETRYSAFE_SINK(retrysafe::redis::RedisSink, "redis", 0)
