package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/extevict/extevict/internal/envoy"
)

// A plan is what a client is going to do, and what its picker.
type plan struct {
	priority, evictions int
	prompt, output      int // tokens
	http2, streamed     bool
	leaves              time.Duration // when the client hangs up; 0 for never
	uploads             time.Duration // how long that takes
	stalls              bool          // it stops reading for a while
	panics              string        // where the picker does
}

func newPlan(rnd *rand.Rand) plan {
	one := func(of int) bool { return rnd.IntN(of) == 0 }
	p := plan{
		priority: rnd.IntN(4) - 1,
		prompt:   20 + rnd.IntN(400),
		output:   1 + rnd.IntN(60),
		http2:    one(2),
		streamed: !one(5),
	}
	if one(6) {
		p.leaves = time.Duration(1 + rnd.IntN(800*int(time.Millisecond)))
	}
	if one(5) {
		p.uploads = time.Duration(1+rnd.IntN(300)) * time.Millisecond
	}
	p.stalls = p.streamed && one(8)
	if one(40) {
		p.panics = places[rnd.IntN(len(places))]
	}
	return p
}

// patience is when a client that does not hang up should have an end.
const patience = 30 * time.Second

// A crowd is clients that call a gateway until they are told to stop.
type crowd struct {
	gateway *gateway
	account *account
	h1, h2  *http.Client
	number  int // of the next round
}

func newCrowd(g *gateway, a *account) *crowd {
	h2 := new(http.Protocols)
	h2.SetUnencryptedHTTP2(true)
	return &crowd{
		gateway: g, account: a,
		h1: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 100}},
		// With a small window a client that stalls leaves its answer in Envoy.
		h2: &http.Client{Transport: &http.Transport{Protocols: h2, HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: 4 << 10}}},
	}
}

func (c *crowd) hangUp() {
	c.h1.CloseIdleConnections()
	c.h2.CloseIdleConnections()
}

// run has n clients call until ctx is done, and returns when each has its end.
func (c *crowd) run(ctx context.Context, n int) {
	var clients sync.WaitGroup
	for i := range n {
		rnd := rand.New(rand.NewPCG(c.account.seed, uint64(c.number*n+i)))
		clients.Go(func() { c.client(ctx, rnd, fmt.Sprintf("r%d-c%d", c.number, i)) })
	}
	clients.Wait()
	c.number++
}

// client calls, one request after the other. Of those that are evicted it tries most again,
// under the same id.
func (c *crowd) client(ctx context.Context, rnd *rand.Rand, name string) {
	for i := 0; ctx.Err() == nil; i++ {
		p := newPlan(rnd)
		for try := 0; ctx.Err() == nil; try++ {
			id := fmt.Sprintf("%s-%d", name, i)
			r := &request{plan: p, id: id, name: fmt.Sprintf("%s-%d", id, try)}
			c.call(r)
			pause := time.Duration(rnd.IntN(100)) * time.Millisecond
			if r.ending == failed || r.ending == refused {
				pause *= 5
			}
			sleep(ctx, pause)
			if r.ending != evicted && r.ending != event && r.ending != reset || rnd.IntN(4) == 0 {
				break
			}
			p.evictions, p.panics, p.leaves = p.evictions+1, "", 0
		}
	}
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// call sends a request and books its end.
func (c *crowd) call(r *request) {
	url, m := c.gateway.target()
	r.mode, r.started = m, time.Now()
	c.account.begin(r)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	if r.leaves > 0 {
		ctx, cancel = context.WithTimeout(context.Background(), r.leaves)
	}
	defer cancel()
	status, header, body, err := c.exchange(ctx, url, r)
	e := failed
	const errorEvent = `"code":"request_evicted"}}` + "\n\n"
	switch {
	case err == nil && r.isWhole(status, body):
		e = whole
	case ctx.Err() != nil && r.leaves > 0:
		e = left
	case err == nil && status == http.StatusTooManyRequests && header.Get("x-evicted-reason") != "":
		e = evicted
	case err == nil && header.Get(refusal) != "":
		e = refused
	case err != nil && status == http.StatusOK && bytes.HasSuffix(body, []byte(errorEvent)):
		e = event
	case err != nil && status == http.StatusOK:
		e = reset
	}
	c.account.change(func() {
		r.ended, r.ending, r.status, r.reason, r.err = time.Now(), e, status, header.Get("x-evicted-reason"), err
		r.tail = string(body[max(0, len(body)-200):])
		if ctx.Err() != nil && r.leaves == 0 {
			c.account.violateLocked("no end within %v: %v", patience, r)
		}
	})
}

func (c *crowd) exchange(ctx context.Context, url string, r *request) (status int, h http.Header, body []byte, err error) {
	text, err := json.Marshal(map[string]any{"prompt": strings.Repeat("ash ", r.prompt), "max_tokens": r.output, "stream": r.streamed})
	if err != nil {
		return 0, nil, nil, err
	}
	up := &upload{ctx: ctx, rest: text, size: len(text)}
	if r.uploads > 0 {
		up.size, up.pause = len(text)/8+1, r.uploads/8
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/completions", up)
	if err != nil {
		return 0, nil, nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", r.id)
	req.Header.Set(envoy.CaseHeader, r.name)
	client := c.h1
	if r.http2 {
		client = c.h2
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, nil, nil, err
	}
	defer resp.Body.Close()
	buf := make([]byte, 2<<10)
	for stalled := !r.stalls; err == nil; {
		var n int
		n, err = resp.Body.Read(buf)
		body = append(body, buf[:n]...)
		if !stalled && len(body) > 0 {
			stalled = true
			sleep(ctx, 700*time.Millisecond)
		}
	}
	if err == io.EOF {
		err = nil
	}
	return resp.StatusCode, resp.Header, body, err
}

// isWhole reports whether an answer has every token there is.
func (r *request) isWhole(status int, body []byte) bool {
	if status != http.StatusOK {
		return false
	}
	if r.streamed {
		return bytes.HasSuffix(body, []byte("data: [DONE]\n\n")) && bytes.Count(body, []byte("data: ")) == r.output+1
	}
	return bytes.Contains(body, []byte(`"completion_tokens":`+strconv.Itoa(r.output)+`,`)) && bytes.HasSuffix(body, []byte("}\n"))
}

// An upload is a body in pieces with pauses between them. http cannot rewind it, so that a
// request is sent once.
type upload struct {
	ctx   context.Context
	rest  []byte
	size  int
	pause time.Duration
}

func (u *upload) Read(p []byte) (int, error) {
	if len(u.rest) == 0 {
		return 0, io.EOF
	}
	if u.pause > 0 {
		sleep(u.ctx, u.pause)
	}
	n := copy(p, u.rest[:min(u.size, len(u.rest))])
	u.rest = u.rest[n:]
	return n, nil
}
