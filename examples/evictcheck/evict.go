package main

import (
	"context"
	"time"
)

// evict has a stream evicted, while others wait or none does, and sees what follows. It
// fails with a finding unless capacity is freed.
func (c *check) evict(ctx context.Context, victim *stream, waiting []*stream) error {
	query, listed, err := c.operator.find(ctx, victim)
	if err == nil && query == "" {
		err = c.over(ctx, victim)
	}
	switch {
	case err != nil:
		return err
	case query == "" && listed == 0:
		return unevictable()
	case query == "":
		return idsDiffer(listed)
	}
	before, err := c.lookAhead(ctx)
	if err != nil {
		return err
	}
	for _, s := range waiting {
		switch {
		case !s.runs():
		case before.finished > c.base.finished && c.base.running == 0:
			return c.short()
		default:
			return unclear(reasonDisturbed, "a waiting request began to run before anything was evicted")
		}
	}
	v := victim.look()
	e := &Eviction{Streamed: true, Tokens: v.tokens, Waiting: len(waiting), Before: before.gauges()}
	c.say("admin", "evicting a stream after %d tokens", v.tokens)
	n, start, err := c.abort(ctx, query, e)
	if err != nil {
		return err
	}
	if n == 0 {
		if err := c.over(ctx, victim); err != nil {
			return err
		}
		return unclear(reasonDisturbed, "the victim was gone when the admin endpoint was told")
	}
	problem, err := c.observe(ctx, e, start, before, victim, waiting)
	if err != nil {
		return err
	}
	c.saw(e, victim, start)
	switch {
	case problem != nil:
		return problem
	case !e.Freed:
		return c.diagnose(e)
	}
	return nil
}

// over fails if the victim has ended by itself, which its client may be about to see.
func (c *check) over(ctx context.Context, victim *stream) error {
	ended, err := c.watch(ctx, 10*c.every, "the victim's end", func(sample) bool { return !victim.look().end.IsZero() })
	if err == nil && ended && victim.look().how() == endComplete {
		err = c.short()
	}
	return err
}

// A forecast is a sample and how fast the KV cache's usage grows, in parts a second.
type forecast struct {
	sample
	growth float64
}

// kvAt is what its usage is if nothing is freed.
func (f forecast) kvAt(t time.Time) float64 { return f.kv + f.growth*t.Sub(f.at).Seconds() }

// lookAhead looks at the metrics for a while.
func (c *check) lookAhead(ctx context.Context) (f forecast, err error) {
	var first sample
	_, err = c.watch(ctx, 5*c.every, "a look at the KV cache", func(m sample) bool {
		if first.at.IsZero() {
			first = m
		}
		f.sample = m
		return false
	})
	if s := f.at.Sub(first.at).Seconds(); s > 0 {
		f.growth = max(0, (f.kv-first.kv)/s)
	}
	return f, err
}

// observe sees what follows an eviction, until all is seen or time is up. If something
// else may be the cause of it, it returns that.
func (c *check) observe(ctx context.Context, e *Eviction, start time.Time, before forecast, victim *stream, waiting []*stream) (problem *finding, err error) {
	// What a stream holds: by half of that the KV cache has to fall, when running does.
	share := (before.kv - c.base.kv) / max(1, before.running-c.base.running)
	looks := 0
	last := before // while running had not fallen
	_, err = c.watch(ctx, c.effect, "an effect", func(m sample) bool {
		e.After = m.gauges()
		switch {
		case e.RunningMS != nil:
		case m.running <= before.running-1:
			e.RunningMS = since(start, m.at)
		default:
			last.sample = m
		}
		if e.RunningMS != nil && e.KVMS == nil {
			looks++
			if m.kv <= last.kvAt(m.at)-share/2 && share > 0 {
				e.KVMS, e.KV = since(start, m.at), known(m.kv)
			}
		}
		for _, s := range waiting {
			if first := s.look().first; !first.IsZero() && (e.StartedMS == nil || *since(start, first) < *e.StartedMS) {
				e.StartedMS = since(start, first)
			}
		}
		if !e.Freed {
			if len(waiting) > 0 {
				e.Freed = e.StartedMS != nil
			} else {
				e.Freed = e.RunningMS != nil && (e.KVMS != nil || !(share > 0))
			}
			if problem = c.ended(victim, m, before.sample); problem != nil {
				e.Freed = false
				return true
			}
		}
		if len(waiting) == 0 && !e.Freed && looks > 5 {
			return true // the KV cache will not fall any more
		}
		return e.Freed && !victim.look().end.IsZero()
	})
	if problem == nil && !e.Freed && e.RunningMS != nil && (e.KVMS != nil || !(share > 0)) {
		e.Freed = true
		c.note("a request that waited did not start within %v, though there was a place in the engine: others took it, or it waits in the gateway, whose queue has not noticed", c.effect)
	}
	return problem, err
}

// ended says whether something else than the eviction has freed capacity.
func (c *check) ended(victim *stream, m, before sample) *finding {
	for _, s := range c.streamed {
		if v := s.look(); s != victim && v.how() == endComplete {
			return c.short()
		}
	}
	if m.finished > before.finished {
		if c.base.running > 0 {
			return unclear(reasonDisturbed, "requests of others ended in the same moment")
		}
		return c.short() // perhaps the victim, which was not stopped
	}
	if m.preemptions > before.preemptions {
		return unclear(reasonDisturbed, "the engine preempted a request by itself in the same moment")
	}
	return nil
}

// abort tells the admin endpoint, and returns how many requests that ended and when it
// was told.
func (c *check) abort(ctx context.Context, query string, e *Eviction) (int, time.Time, error) {
	start := time.Now()
	n, err := c.operator.abort(ctx, query)
	e.AdminMS = millis(time.Since(start))
	return n, start, err
}

// saw reports an eviction.
func (c *check) saw(e *Eviction, victim *stream, start time.Time) {
	v := victim.look()
	e.Client, e.Text, e.Status, e.Code = v.how(), v.text(start), v.status, v.code
	e.ToldMS, e.EndedMS = since(start, v.told), since(start, v.end)
	c.report.Evictions = append(c.report.Evictions, *e)
	switch {
	case e.Freed && e.StartedMS != nil:
		c.say("engine", "a waiting request had its first token after %s", ms(e.StartedMS))
	case e.Freed:
		c.say("engine", "running fell after %s", ms(e.RunningMS))
	default:
		c.say("engine", "not freed after %.1f s: %s", time.Since(start).Seconds(), e.After)
	}
}

// evictWhole has a request evicted whose client has nothing yet: it is not streamed.
// It fails with a finding if that has no effect at all.
func (c *check) evictWhole(ctx context.Context) error {
	if c.operator.renamed {
		c.note("a request that is not streamed was not tried: the gateway gives it an id of its own, which only its response tells")
		return nil
	}
	m, err := readMetrics(ctx, c.operator.client, c.metrics, c.names)
	if err != nil {
		return err
	}
	s := c.add(ctx, false)
	query := ""
	before := m
	ready, err := c.watch(ctx, c.effect, "a request that is not streamed", func(n sample) bool {
		if query == "" {
			query, _, err = c.operator.find(ctx, s)
		}
		before = n
		return err != nil || !s.look().end.IsZero() || query != "" && n.running > m.running
	})
	switch {
	case err != nil:
		return err
	case !s.look().end.IsZero():
		c.note("a request that is not streamed was not tried: %s", s.look().text(time.Time{}))
		return nil
	case !ready:
		c.note("a request that is not streamed was not tried: it was not seen to run")
		return nil
	}
	e := Eviction{Before: before.gauges()}
	c.say("admin", "evicting a request that is not streamed")
	n, start, err := c.abort(ctx, query, &e)
	if err != nil {
		return err
	}
	if n == 0 {
		c.note("a request that is not streamed was not tried: it was gone when the admin endpoint was told")
		return nil
	}
	_, err = c.watch(ctx, c.effect, "an effect", func(m sample) bool {
		e.After = m.gauges()
		if e.RunningMS == nil && m.running <= before.running-1 && !(m.finished > before.finished) {
			e.RunningMS, e.Freed = since(start, m.at), true
		}
		return e.Freed && !s.look().end.IsZero()
	})
	if err != nil {
		return err
	}
	c.saw(&e, s, start)
	return c.judgeWhole(&e)
}
