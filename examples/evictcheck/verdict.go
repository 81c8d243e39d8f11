package main

import (
	"fmt"
	"net/http"
	"time"
)

// diagnose says why an eviction freed nothing.
func (c *check) diagnose(e *Eviction) *finding {
	f := &finding{verdict: no}
	engine := c.report.Engine
	switch {
	case e.Client == endRunning:
		return runsOn("the gateway took the eviction and let the request run on: neither client nor engine noticed")
	case e.RunningMS != nil && e.KVMS == nil:
		f.reason = reasonKV
		f.because = "the engine ran one request less, and its KV cache stayed as full as before"
		f.mend = []string{"update the engine: it keeps the blocks of a request whose connection has closed"}
	case engine == nil:
		f.reason = reasonNotFreed
		f.because = "the client's response ended and the request kept its place in the engine"
		f.mend = append([]string{"-engine URL tells the two apart: a hop in between that keeps its upstream connection open, or the engine that ignores its end"}, hop...)
	case engine.Leaks:
		f.reason = reasonLeaked
		f.because = "the engine ends a request whose connection has closed and does not free its place"
		f.mend = []string{"update the engine; until then each request that a client leaves costs a place until the engine is restarted"}
	case !engine.Frees:
		f.reason = reasonIgnored
		f.because = "the engine goes on with a request when its connection has closed"
		f.mend = []string{
			"evictor.WithAborter with the engine's own call, as in examples/custom-aborter (vLLM: --enable-scale-out)",
			"update the engine, or the server in front of it, to end a request when its client has left (vLLM does)",
		}
	default:
		f.reason = reasonHop
		f.because = "a hop between gateway and engine keeps the request running: the client's response ended, and the engine alone frees a request whose connection closes"
		f.mend = hop
	}
	return f
}

var hop = []string{
	"take the hop out, or have it close its upstream connection when its client has gone (nginx: proxy_ignore_client_abort off; HAProxy: option abortonclose)",
	"evictor.WithAborter with the engine's own call, as in examples/custom-aborter",
}

func unevictable() *finding {
	return &finding{
		verdict: no, reason: reasonUnevictable,
		because: "the streams run and the ext_proc server has no request in flight: Envoy has ended its ext_proc streams, or sends it none",
		mend: []string{
			"Envoy's ext_proc filter: processing_mode: {request_header_mode: SEND, response_trailer_mode: SEND}, which keeps the stream open as long as the request (needed since 1.37)",
			"observability_mode: false",
			"-admin of the server that Envoy calls, if there are several",
		},
	}
}

func heldBack(after time.Duration) *finding {
	f := unclear(reasonHeldBack, "the engine has run the streams for %v and the gateway has passed nothing on", after)
	f.mend = []string{"Envoy's ext_proc filter: response_body_mode NONE, STREAMED or FULL_DUPLEX_STREAMED, not BUFFERED; buffer filters: off"}
	return f
}

func elsewhere(streams int, rise float64) *finding {
	f := unclear(reasonElsewhere, "%d streams run and the engine's running count rose by %s", streams, count(rise))
	f.mend = []string{"-metrics of the engine that serves them; or pin the streams to it with -header, if the gateway has a header for that"}
	return f
}

// short is the finding that a stream ended by itself.
func (c *check) short() *finding {
	f := unclear(reasonTooShort, "a stream of %d tokens ended by itself before there was a result", c.tokens)
	f.mend = []string{fmt.Sprintf("-max-tokens above %d, or a shorter -effect", c.tokens)}
	return f
}

func idsDiffer(listed int) *finding {
	f := unclear(reasonIDs, "the admin endpoint lists %d requests and none with the id that the check sent as x-request-id", listed)
	f.mend = []string{
		"Envoy's http_connection_manager: preserve_external_request_id: true, or always_set_request_id_in_response: true",
		"if the check's own requests are missing, see response_trailer_mode: SEND",
	}
	return f
}

// runsOn is the finding that an eviction changed nothing.
func runsOn(because string) *finding {
	return &finding{verdict: no, reason: reasonRunsOn, because: because, mend: []string{
		"Envoy's ext_proc filter: disable_immediate_response: false (if true, failure_mode_allow: true lets the request run on)",
		"observability_mode: false",
	}}
}

// freed is the finding that all is well, at least for streams.
func (c *check) freed() *finding {
	f := &finding{verdict: yes, reason: reasonFreed}
	first := c.report.Evictions[0]
	if first.StartedMS != nil {
		f.because = fmt.Sprintf("a waiting request had its first token %s after an eviction", ms(first.StartedMS))
	} else {
		f.because = fmt.Sprintf("the engine ran one request less %s after an eviction", ms(first.RunningMS))
	}
	if e := c.report.Evictions[len(c.report.Evictions)-1]; !e.Freed {
		f.because += "; but only of streams: a request that is not streamed kept its place"
		f.mend = []string{
			"an engine, and hops, that see a client leave before they have written anything (llama.cpp's server does not)",
			"evictor.WithAborter with the engine's own call, as in examples/custom-aborter",
		}
	}
	return f
}

// judgeWhole judges the eviction of a request that is not streamed.
func (c *check) judgeWhole(e *Eviction) error {
	switch {
	case !e.Freed && e.Client == endRunning:
		return runsOn("the gateway took the eviction of a request without a response and let it run on; only streams in full flow end")
	case e.Client == endStatus && e.Status == http.StatusInternalServerError && e.Code == "":
		c.note("a client without a response got Envoy's own status 500 instead of the server's answer")
		c.report.Mend = append(c.report.Mend, "Envoy's ext_proc filter: disable_immediate_response: false")
	}
	return nil
}

// remark notes what could be better and does not decide.
func (c *check) remark() {
	for _, v := range c.report.Evictions {
		if v.Streamed && v.Freed && (v.EndedMS == nil || *v.EndedMS > 500) {
			c.note("a client's stream ended only after %s: Envoy's delayed_close_timeout says when, 0.1s is enough", ms(v.EndedMS))
			return
		}
	}
}

// why says why a stream did not come to run.
func (v seen) why() string {
	switch {
	case v.err == nil:
		return v.text(time.Time{})
	case v.status == 0:
		return v.err.Error()
	default:
		return fmt.Sprintf("%s (%v)", v.text(time.Time{}), v.err)
	}
}
