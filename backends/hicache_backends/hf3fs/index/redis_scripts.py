"""The steps of the Redis index, as Lua scripts. Each script is one atomic step.

KEYS[1] is the prefix of all keys of a root. It has a hash tag, so that all of them are on one server.

    P:state         hash    made, run, until_ms, maker (`redis_epoch`); used: bytes of all slots in use
    P:spaces        hash    key-space id -> bytes of a slot
    P:allocated     hash    key-space id -> number of slots
    P:pages:SPACE   hash    page hash -> "slot stamp"
    P:free:SPACE    zset    slot, by slot
    P:lru           zset    "space hash", by access time
    P:leases        zset    "space slot stamp", by the end of the lease

The docstring of a script lists its arguments, then "->" and its result.
"""

from __future__ import annotations

from hicache_backends.hf3fs.index.base import MOST_AHEAD_NS

_COMMON = """
local P = KEYS[1]
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local function size_of(space)
  return tonumber(redis.call('HGET', P .. ':spaces', space) or 0)
end
local function release(space, slot)
  redis.call('ZADD', P .. ':free:' .. space, slot, slot)
  redis.call('HINCRBY', P .. ':state', 'used', -size_of(space))
end
local function detach(space, hash)
  local place = redis.call('HGET', P .. ':pages:' .. space, hash)
  if place then
    redis.call('HDEL', P .. ':pages:' .. space, hash)
    redis.call('ZREM', P .. ':lru', space .. ' ' .. hash)
  end
  return place
end
local function now_us()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local function text(us)
  return string.format('%.0f', us)
end
local function latest_us()
  return now_us() + AHEAD_US
end
local function behind_us(client_us, earliest_us)
  local now, newest = now_us(), redis.call('ZREVRANGEBYSCORE', P .. ':lru', text(latest_us()), '-inf',
      'WITHSCORES', 'LIMIT', 0, 1)[2]
  if newest and tonumber(newest) > now then return tonumber(newest) + 100 - earliest_us end
  return now - client_us
end
local function used()
  return tonumber(redis.call('HGET', P .. ':state', 'used') or 0)
end
""".replace("AHEAD_US", str(MOST_AHEAD_NS // 1000))

USED = _COMMON + "return used()"
"""no arguments -> bytes used"""

RESERVE = (
    _COMMON
    + """
local space, size, wanted = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local capacity, high, low = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local ends_ms = now_ms() + tonumber(ARGV[7])
redis.call('HSET', P .. ':spaces', space, size)
for _, lease in ipairs(
    redis.call('ZRANGEBYSCORE', P .. ':leases', '-inf', now_ms(), 'LIMIT', 0, 1000)) do
  redis.call('ZREM', P .. ':leases', lease)
  local owner, slot = string.match(lease, '^(%x+) (%d+) ')
  release(owner, slot)
end
local evicted, count = 0, wanted
if capacity >= 0 then
  if used() + wanted * size > capacity * high then
    local over, most = used() + wanted * size - capacity * low, wanted + 1000
    local latest = '(' .. text(latest_us())
    while over > 0 and most > 0 do
      local oldest = latest and redis.call(
          'ZRANGEBYSCORE', P .. ':lru', latest, '+inf', 'LIMIT', 0, 1)[1]
      if not oldest then
        latest = false
        oldest = redis.call('ZPOPMIN', P .. ':lru')[1]
      end
      if not oldest then break end
      local owner, hash = string.match(oldest, '^(%x+) (%x+)$')
      local place = detach(owner, hash)
      redis.call('ZREM', P .. ':lru', oldest)
      if place then
        release(owner, string.match(place, '^%d+'))
        over, evicted = over - size_of(owner), evicted + 1
      end
      most = most - 1
    end
  end
  count = math.max(0, math.min(wanted, math.floor((capacity - used()) / size)))
end
local slots = {}
if count > 0 then
  local popped = redis.call('ZPOPMIN', P .. ':free:' .. space, count)
  for i = 1, #popped, 2 do slots[#slots + 1] = tonumber(popped[i]) end
end
local fresh = count - #slots
local before = tonumber(redis.call('HINCRBY', P .. ':allocated', space, fresh)) - fresh
for i = 0, fresh - 1 do slots[#slots + 1] = before + i end
for i, slot in ipairs(slots) do
  redis.call('ZADD', P .. ':leases', ends_ms, space .. ' ' .. slot .. ' ' .. ARGV[7 + i])
end
redis.call('HINCRBY', P .. ':state', 'used', #slots * size)
return {slots, before, fresh, evicted, used()}
"""
)
"""key space, bytes of a slot, count, capacity or -1, high and low watermark, lease in ms, `count` stamps
-> slots, the first new slot, number of new slots, number of evicted pages, bytes used
"""

SETTLE = (
    _COMMON
    + """
local space, ends_ms, doubles, lost = ARGV[1], now_ms() + tonumber(ARGV[2]), {}, 0
local behind = behind_us(tonumber(ARGV[3]), tonumber(ARGV[4]))
for i = 5, #ARGV, 4 do
  local hash, slot, stamp, used_us = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local lease = space .. ' ' .. slot .. ' ' .. stamp
  if not redis.call('ZSCORE', P .. ':leases', lease) then
    lost = lost + 1
  elseif redis.call('HSETNX', P .. ':pages:' .. space, hash, slot .. ' ' .. stamp) == 0 then
    redis.call('ZADD', P .. ':leases', ends_ms, lease)
    doubles[#doubles + 1] = slot .. ' ' .. stamp
  else
    redis.call('ZREM', P .. ':leases', lease)
    redis.call('ZADD', P .. ':lru', text(used_us + behind), space .. ' ' .. hash)
  end
end
return {doubles, lost}
"""
)
"""key space, lease in ms, time of this host and earliest access in us, then hash, slot, stamp and
access time of each page
-> "slot stamp" of each page that is already in another slot, with a new lease; number of ended leases
"""

TOUCH = (
    _COMMON
    + """
local behind, latest = behind_us(tonumber(ARGV[1]), tonumber(ARGV[2])), latest_us()
for i = 3, #ARGV, 2 do
  local score, used_us = redis.call('ZSCORE', P .. ':lru', ARGV[i]), ARGV[i + 1] + behind
  if score and (tonumber(score) < used_us or tonumber(score) > latest) then
    redis.call('ZADD', P .. ':lru', text(used_us), ARGV[i])
  end
end
"""
)
"""time of this host and earliest access in us, then "space hash" and access time of each page"""

RENEW = (
    _COMMON
    + """
local ends_ms, kept = now_ms() + tonumber(ARGV[2]), {}
for i = 3, #ARGV do
  local lease = ARGV[1] .. ' ' .. ARGV[i]
  if redis.call('ZSCORE', P .. ':leases', lease) then
    redis.call('ZADD', P .. ':leases', ends_ms, lease)
    kept[#kept + 1] = ARGV[i]
  end
end
return kept
"""
)
"""key space, lease in ms, "slot stamp" of each lease -> the leases that were renewed in time"""

RELEASE = (
    _COMMON
    + """
for i = 2, #ARGV, 2 do
  local lease = ARGV[1] .. ' ' .. ARGV[i] .. ' ' .. ARGV[i + 1]
  if redis.call('ZREM', P .. ':leases', lease) == 1 then release(ARGV[1], ARGV[i]) end
end
return used()
"""
)
"""key space, then slot and stamp of each lease -> bytes used"""

FORGET = (
    _COMMON
    + """
for i = 2, #ARGV, 3 do
  local place = ARGV[i + 1] .. ' ' .. ARGV[i + 2]
  if redis.call('HGET', P .. ':pages:' .. ARGV[1], ARGV[i]) == place then
    detach(ARGV[1], ARGV[i])
    release(ARGV[1], ARGV[i + 1])
  end
end
"""
)
"""key space, then hash, slot and stamp of each page"""

DETACH = (
    _COMMON
    + """
if (redis.call('HGET', P .. ':state', 'maker') or '') ~= ARGV[3] then return false end
local ends_ms, places = now_ms() + tonumber(ARGV[2]), {}
for i = 4, #ARGV do
  local place = detach(ARGV[1], ARGV[i])
  if place then
    redis.call('ZADD', P .. ':leases', ends_ms, ARGV[1] .. ' ' .. place)
    places[#places + 1] = place
  end
end
return places
"""
)
"""key space, lease in ms, maker of the index, hashes -> "slot stamp" of the pages that existed; their
slots are leased now. nil if another process has built the index since
"""

LEASE_FREE = (
    _COMMON
    + """
local ends_ms, slots = now_ms() + tonumber(ARGV[2]), {}
local name = P .. ':free:' .. ARGV[1]
for _, slot in ipairs(
    redis.call('ZRANGEBYSCORE', name, '(' .. ARGV[5], '+inf', 'LIMIT', 0, ARGV[3])) do
  slots[#slots + 1] = tonumber(slot)
  redis.call('ZREM', name, slot)
  redis.call('ZADD', P .. ':leases', ends_ms, ARGV[1] .. ' ' .. slot .. ' ' .. ARGV[4])
end
redis.call('HINCRBY', P .. ':state', 'used', #slots * size_of(ARGV[1]))
return slots
"""
)
"""key space, lease in ms, greatest number of slots, stamp, a slot
-> slots after it that were free and are leased now
"""

_DROP = (
    _COMMON
    + """
local space, size = ARGV[1], size_of(ARGV[1])
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', P .. ':leases', '-inf', now_ms())) do
  redis.call('ZREM', P .. ':leases', lease)
  local owner, slot = string.match(lease, '^(%x+) (%d+) ')
  release(owner, slot)
end
for _, lease in ipairs(redis.call('ZRANGEBYSCORE', P .. ':leases', '-inf', '+inf')) do
  if string.match(lease, '^%x+') == space then return {-1, 0, 0} end
end
local name = P .. ':pages:' .. space
"""
)

DROP = (
    _DROP
    + """
local pages = #redis.call('HKEYS', name)
if pages > 0 and ARGV[2] == '1' then return {-1, 0, 0} end
for _, hash in ipairs(redis.call('HKEYS', name)) do
  redis.call('ZREM', P .. ':lru', space .. ' ' .. hash)
end
redis.call('DEL', name, P .. ':free:' .. space)
if pages > 0 then redis.call('HINCRBY', P .. ':state', 'used', -pages * size) end
local files = 0
if size > 0 then
  local each = math.max(1, math.floor(tonumber(ARGV[3]) / size))
  local allocated = tonumber(redis.call('HGET', P .. ':allocated', space) or 0)
  files = math.ceil(allocated / each)
  redis.call('HSET', P .. ':allocated', space, files * each)
end
return {pages, files, tonumber(redis.call('HGET', P .. ':allocated', space) or 0)}
"""
)
"""key space, 1 to keep pages, bytes of a file
-> number of pages, of files in which no writer has a slot or will get one, and of slots; the first
is -1 if a writer has slots there, or if there are pages to keep
"""

DROPPED = (
    _DROP
    + """
if #redis.call('HKEYS', name) == 0 and redis.call('HGET', P .. ':allocated', space) == ARGV[2] then
  redis.call('HDEL', P .. ':allocated', space)
  redis.call('HDEL', P .. ':spaces', space)
  redis.call('DEL', P .. ':free:' .. space)
end
return {0, 0, 0}
"""
)
"""key space whose directory is gone, number of slots that it had"""

INTERRUPT = (
    _COMMON
    + """
local run = string.match(redis.call('INFO', 'server'), 'run_id:(%w+)')
if redis.call('HGET', P .. ':state', 'run') ~= run then
  redis.call('HSET', P .. ':state', 'run', run, 'until_ms', now_ms() + tonumber(ARGV[1]))
end
"""
)
"""pause in ms during which no process may use the index

The server compares its run id itself, because an id that the network had damaged would stop every
process.
"""

START = (
    _COMMON
    + """
if redis.call('GET', P .. ':maker') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', P .. ':maker', ARGV[2])
if redis.call('HGET', P .. ':state', 'made') then
  redis.call('DEL', P .. ':maker')
  return 2
end
for i = 3, #ARGV do redis.call('DEL', P .. ':' .. ARGV[i]) end
redis.call('HSET', P .. ':state', 'used', 0)
return 1
"""
)
"""maker, its silence limit in ms, names of the keys of an earlier index
-> 0 if another process is building the index now, 2 if another process has built it meanwhile
"""

FILL = (
    _COMMON
    + """
if redis.call('GET', P .. ':maker') ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', P .. ':maker', ARGV[2])
local space = ARGV[3]
redis.call('HSET', P .. ':spaces', space, ARGV[4])
redis.call('HSET', P .. ':allocated', space, ARGV[5])
for i = 6, #ARGV, 3 do
  local hash, place, used_us = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if hash == '' then
    redis.call('ZADD', P .. ':free:' .. space, place, place)
  else
    redis.call('HSET', P .. ':pages:' .. space, hash, place)
    redis.call('ZADD', P .. ':lru', used_us, space .. ' ' .. hash)
    redis.call('HINCRBY', P .. ':state', 'used', size_of(space))
  end
end
return 1
"""
)
"""maker, its silence limit in ms, key space, bytes of a slot, number of slots, then hash, place and time
of each page; for a free slot an empty hash and its number
-> 0 if another process is building the index now
"""

FINISH = (
    _COMMON
    + """
if redis.call('GET', P .. ':maker') ~= ARGV[1] then return 0 end
redis.call('DEL', P .. ':maker')
redis.call('HSET', P .. ':state', 'made', 1, 'maker', ARGV[1])
return 1
"""
)
"""maker -> 0 if another process is building the index now"""
