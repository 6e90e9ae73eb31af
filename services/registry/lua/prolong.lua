-- Argument: least time in ms that each lease shall last from now. Also for leases whose time is over, if nobody has
-- ended them yet. Returns how many were prolonged.
local until_ms = now_ms + tonumber(ARGV[1])
local ids = redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', until_ms)
for _, server_id in ipairs(ids) do
    redis.call('ZADD', EXPIRIES, until_ms, server_id)
    redis.call('ZADD', CHANGES, redis.call('INCR', REVISION), server_id)
end
return #ids
