package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"
)

// A config says what to check and how.
type config struct {
	gateway string // base URL
	path    string // of the completions
	model   string
	header  http.Header
	http2   bool
	metrics string // URL of the engine's
	engine  string // base URL of the engine itself; "" to leave it alone
	admin   string // base URL of the admin endpoint
	names   names

	streams int           // to start with
	prompt  int           // bytes
	tokens  int           // that a stream generates at most
	effect  time.Duration // that long an effect is waited for
	every   time.Duration // the pause between two looks at the metrics
}

// A check is one run. It belongs to the goroutine of run; a stream's is its own.
type check struct {
	config
	client   *http.Client
	operator operator
	say      func(who, format string, a ...any) // shows progress
	report   Report
	streamed []*stream // all that were started, to be stopped
	idle     sample    // before there were any
	base     sample    // when the first went through the gateway
	failing  time.Time // since when the metrics can't be read; zero if they can
}

// A finding ends a check.
type finding struct {
	verdict, reason, because string
	mend                     []string
}

func (f *finding) Error() string { return f.because }

func unclear(reason, format string, a ...any) *finding {
	return &finding{verdict: unknown, reason: reason, because: fmt.Sprintf(format, a...)}
}

// errTimeout is the cause of a context that ends because time is up.
var errTimeout = errors.New("the time was up")

// run runs a check until ctx ends, which is an interrupt unless its cause is errTimeout.
// When it returns, all of its streams have been hung up and their goroutines have ended.
func run(ctx context.Context, c config, say func(who, format string, a ...any)) *Report {
	transport := &http.Transport{DisableCompression: true, Protocols: new(http.Protocols)}
	transport.Protocols.SetHTTP1(!c.http2)
	transport.Protocols.SetHTTP2(true)
	transport.Protocols.SetUnencryptedHTTP2(c.http2)
	aside := new(http.Transport) // HTTP/1.1, for all that is not a stream
	defer transport.CloseIdleConnections()
	defer aside.CloseIdleConnections()
	k := &check{
		config: c, say: say, client: &http.Client{Transport: transport},
		operator: operator{client: &http.Client{Transport: aside, Timeout: 15 * time.Second}, url: c.admin},
		report:   Report{Mend: []string{}, Notes: []string{}, Evictions: []Eviction{}},
	}
	start := time.Now()
	err := k.steps(ctx)
	k.stop(k.streamed...)
	r := &k.report
	f, ok := errors.AsType[*finding](err)
	switch {
	case ok:
	case context.Cause(ctx) == errTimeout:
		f = unclear(reasonTimeout, "%v", errTimeout)
		f.mend = []string{"a longer -timeout; the last line of the progress says what was waited for"}
	case ctx.Err() != nil:
		f = unclear(reasonInterrupted, "it was interrupted")
	default:
		f = unclear(reasonUnreachable, "%v", err)
	}
	r.Verdict, r.Reason, r.Because = f.verdict, f.reason, f.because
	r.Mend = append(r.Mend, f.mend...)
	if ctx.Err() == nil && !k.idle.at.IsZero() {
		k.settle(ctx)
	}
	k.remark()
	r.TookMS = millis(time.Since(start))
	return r
}

// steps is the check; its error says how it came out.
func (c *check) steps(ctx context.Context) error {
	var err error
	if c.idle, err = readMetrics(ctx, c.operator.client, c.metrics, c.names); err != nil {
		return err
	}
	c.say("engine", "%s", c.idle)
	if c.idle.running > 0 {
		c.note("the engine had %s other requests: figures of running and KV cache are theirs too", count(c.idle.running))
	}
	if _, err := c.operator.list(ctx, url.Values{"limit": {"1"}}); err != nil {
		return err
	}
	if err := c.askEngine(ctx); err != nil {
		return err
	}
	running, waiting, err := c.fill(ctx)
	if err != nil {
		return err
	}
	victim := running[len(running)-1]
	if err := c.evict(ctx, victim, waiting); err != nil {
		return err
	}
	if len(waiting) > 0 {
		// Once more while nobody takes the place, so that the gauges can be seen to fall.
		for _, s := range waiting {
			if !s.runs() {
				c.stop(s)
			}
		}
		if err := c.quiet(ctx); err != nil {
			return err
		}
		if err := c.evict(ctx, running[0], nil); err != nil {
			return err
		}
	}
	err = c.evictWhole(ctx)
	if _, found := errors.AsType[*finding](err); found || ctx.Err() != nil {
		return err
	}
	if err != nil {
		c.note("a request that is not streamed was not tried: %v", err)
	}
	return c.freed()
}

func (c *check) note(format string, a ...any) {
	c.report.Notes = append(c.report.Notes, fmt.Sprintf(format, a...))
}

// add starts a request through the gateway.
func (c *check) add(ctx context.Context, streamed bool) *stream {
	s := c.start(ctx, c.gateway, streamed, c.tokens)
	c.streamed = append(c.streamed, s)
	return s
}

// stop hangs up and waits until all is over.
func (c *check) stop(ss ...*stream) {
	for _, s := range ss {
		s.stop()
	}
	for _, s := range ss {
		<-s.over
	}
}

// watch looks at the metrics until over says so, which is true then, or for as long as
// limit; 0 is until ctx ends. It fails with ctx, or if the metrics can't be read for
// three seconds.
func (c *check) watch(ctx context.Context, limit time.Duration, what string, over func(sample) bool) (bool, error) {
	start := time.Now()
	shown := start
	for {
		m, err := readMetrics(ctx, c.operator.client, c.metrics, c.names)
		switch {
		case ctx.Err() != nil:
			return false, context.Cause(ctx)
		case err == nil:
			c.failing = time.Time{}
			if over(m) {
				return true, nil
			}
		case c.failing.IsZero():
			c.failing = time.Now()
		case time.Since(c.failing) > 3*time.Second:
			return false, err
		}
		if limit > 0 && time.Since(start) >= limit {
			return false, nil
		}
		if time.Since(shown) >= time.Second {
			shown = time.Now()
			c.say("engine", "%s: waiting for %s", m, what)
		}
		select {
		case <-time.After(c.every):
		case <-ctx.Done():
			return false, context.Cause(ctx)
		}
	}
}

// settle waits until the engine is rid of the check's requests, and reports what is
// left.
func (c *check) settle(ctx context.Context) {
	limit := c.effect
	if c.report.Verdict != yes {
		limit = min(limit, 500*time.Millisecond)
	}
	c.say("engine", "all streams are hung up")
	c.watch(ctx, limit, "the engine to be rid of them", func(m sample) bool {
		c.report.After = m.gauges()
		return m.running <= c.idle.running
	})
	if left := c.report.After.Running; left != nil && *left > c.idle.running {
		c.note("requests of this check still had places in the engine when all clients had hung up (%s): until -max-tokens, if the engine doesn't leak", count(*left-c.idle.running))
	}
}
