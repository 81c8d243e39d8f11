package main

import (
	"context"
	"time"
)

// fill starts streams, and one more if all run at once. It returns those that run and
// those that have to wait.
func (c *check) fill(ctx context.Context) (running, waiting []*stream, err error) {
	if c.base, err = readMetrics(ctx, c.operator.client, c.metrics, c.names); err != nil {
		return nil, nil, err
	}
	c.say("gateway", "starting %d streams of up to %d tokens", c.streams, c.tokens)
	for range c.streams {
		c.add(ctx, true)
	}
	if running, waiting, err = c.started(ctx); err != nil {
		return nil, nil, err
	}
	if len(waiting) == 0 {
		c.say("gateway", "all %d streams run: starting one more", len(running))
		c.add(ctx, true)
		if running, waiting, err = c.started(ctx); err != nil {
			return nil, nil, err
		}
	}
	l := &c.report.Load
	l.Streams, l.Waiting, l.Saturated, l.Before = len(running), len(waiting), len(waiting) > 0, c.base.gauges()
	if len(waiting) > 0 {
		c.say("gateway", "%d streams run, %d wait", len(running), len(waiting))
	} else {
		c.say("gateway", "%d streams run, none waits: the engine is not full", len(running))
		c.note("the engine took all %d streams at once: with -streams %d or more a request would have to wait, and could be seen to start", len(running), 2*len(running))
	}
	return running, waiting, nil
}

// started waits until each stream of the check runs or is seen to wait.
func (c *check) started(ctx context.Context) (running, waiting []*stream, err error) {
	var problem error
	var news, steady, stuck time.Time // the last began to run; all are in their place; the engine runs them and no token is here
	began, had := 0, 0                // streams; tokens that the first of them had when all were in their place
	_, err = c.watch(ctx, 0, "the streams to run", func(m sample) bool {
		c.report.Load.Full = m.gauges()
		if running, waiting, problem = c.places(); problem != nil {
			return true
		}
		if news.IsZero() || len(running) > began {
			news, began = m.at, len(running)
		}
		n := m.running - c.base.running
		if len(running) > 0 || n < 1 || m.generated <= c.base.generated {
			stuck = time.Time{}
		} else if stuck.IsZero() {
			stuck = m.at
		} else if m.at.Sub(stuck) > 2*c.effect {
			problem = heldBack(2 * c.effect)
			return true
		}
		// The engine's count of those that run has those in their prefill too, which are not
		// here yet and do not wait. If others come and go, or the gateway has a queue of its
		// own, time must tell.
		counted, queued, quiet := n <= float64(len(running)), m.waiting >= c.base.waiting+1, m.at.Sub(news) > c.effect
		inPlace := len(running) > 0 && (len(waiting) == 0 || counted && queued || quiet && (counted || queued))
		switch {
		case !inPlace:
			steady = time.Time{}
		case steady.IsZero():
			steady, had = m.at, running[0].look().tokens
		}
		switch {
		case !inPlace:
			return false
		case len(waiting) > 0:
			// An engine admits what it can at its next step: it has to have made some.
			return m.at.Sub(steady) >= 5*c.every && running[0].look().tokens >= had+5
		case n >= float64(len(running)):
			return true
		case m.at.Sub(steady) >= c.effect:
			problem = elsewhere(len(running), n)
			return true
		}
		return false
	})
	if err == nil {
		err = problem
	}
	return running, waiting, err
}

// places returns the streams that run and those that have no token yet. It fails if one
// has ended.
func (c *check) places() (running, waiting []*stream, err error) {
	for _, s := range c.streamed {
		v := s.look()
		switch {
		case v.how() == endComplete:
			return nil, nil, c.short()
		case !v.end.IsZero():
			return nil, nil, unclear(reasonUnreachable, "the gateway did not serve a stream: %s", v.why())
		case v.first.IsZero():
			waiting = append(waiting, s)
		default:
			running = append(running, s)
		}
	}
	return running, waiting, nil
}

// quiet waits until none of the check's requests waits.
func (c *check) quiet(ctx context.Context) error {
	_, err := c.watch(ctx, c.effect, "the queue to be empty", func(m sample) bool { return !(m.waiting > c.base.waiting) })
	return err
}
