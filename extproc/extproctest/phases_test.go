package extproctest_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestPhases is the phase matrix measured on Envoy 1.37 to 1.40: what becomes of a request that is evicted in each phase.
func TestPhases(t *testing.T) {
	const answered, reset, runsOn = "answered", "reset", "runs on"
	type row struct{ held, upload, waiting, headers, mid, last, after string }
	for name, tt := range map[string]struct {
		modes *modes
		want  row
	}{
		"headers SKIP, body NONE, trailers SKIP": {&modes{ResponseHeaderMode: skip}, row{answered, runsOn, runsOn, "", runsOn, "", ""}},
		"headers SEND, body NONE, trailers SKIP": {&modes{}, row{answered, answered, answered, answered, runsOn, "", ""}},
		"headers SKIP, body NONE, trailers SEND": {&modes{ResponseHeaderMode: skip, ResponseTrailerMode: send}, row{answered, answered, answered, "", reset, "", ""}},
		"headers SEND, body NONE, trailers SEND": {&modes{ResponseTrailerMode: send}, row{answered, answered, answered, answered, reset, "", ""}},
		"STREAMED":                               {&modes{ResponseBodyMode: streamed}, row{answered, answered, answered, answered, reset, reset, runsOn}},
		"STREAMED both ways":                     {&modes{ResponseBodyMode: streamed, RequestBodyMode: streamed}, row{answered, answered, answered, answered, reset, reset, runsOn}},
		"FULL_DUPLEX_STREAMED":                   {&modes{ResponseBodyMode: duplex, ResponseTrailerMode: send}, row{answered, answered, answered, answered, reset, reset, runsOn}},
		"BUFFERED":                               {&modes{ResponseBodyMode: buffered}, row{answered, answered, answered, answered, answered, answered, runsOn}},
		"BUFFERED_PARTIAL":                       {&modes{ResponseBodyMode: partial}, row{answered, answered, answered, answered, answered, answered, runsOn}},
		"only a STREAMED request":                {&modes{RequestBodyMode: streamed, ResponseHeaderMode: skip}, row{answered, answered, runsOn, "", runsOn, "", ""}},
		// A request's body that was sent as a whole keeps the stream open (measured on 1.40).
		"only a BUFFERED request": {&modes{RequestBodyMode: buffered, ResponseHeaderMode: skip}, row{answered, answered, answered, "", reset, "", ""}},
	} {
		// The upload takes 20 ms; then come three tokens, 10 ms apart, and the end after 10 more.
		for phase, p := range map[string]struct {
			want string
			at   time.Duration // when to evict; if 0, at
			msg  string        // this message, the last of its kind if it has an end
		}{
			"request headers held": {want: tt.want.held, msg: "reqH"},
			"upload":               {want: tt.want.upload, at: 5 * time.Millisecond},
			"waiting":              {want: tt.want.waiting, at: 25 * time.Millisecond},
			"headers held":         {want: tt.want.headers, msg: "resH"},
			"mid body":             {want: tt.want.mid, at: 45 * time.Millisecond},
			"end held":             {want: tt.want.last, msg: "resB"},
			"after the end":        {want: tt.want.after, at: 65 * time.Millisecond},
		} {
			if p.want == "" {
				continue
			}
			t.Run(name+"/"+phase, func(t *testing.T) {
				s := &scene{model: tokens(3), req: upload("a", "b")}
				s.envoy.Config = mode(tt.modes)
				s.envoy.Server = serverFunc(func(st stream) error {
					out := make(chan *response)
					go func() {
						defer close(out)
						for {
							r, err := st.Recv()
							if err != nil {
								return
							}
							m := echo(r, tt.modes.ResponseBodyMode == duplex)
							if kind(r) == p.msg && (p.msg != "resB" || r.GetResponseBody().EndOfStream) {
								m = evict()
							}
							out <- m
						}
					}()
					var now <-chan time.Time
					if p.at > 0 {
						now = time.After(p.at)
					}
					for evicted := false; ; {
						select {
						case m, ok := <-out:
							if !ok {
								return nil
							}
							if !evicted {
								st.Send(m)
							}
							evicted = evicted || m.GetImmediateResponse() != nil
						case <-now:
							st.Send(evict())
							evicted = true
						}
					}
				})
				got := s.play(t)
				want := outcome{Upstream: "canceled"}
				switch {
				case p.want == answered:
					want.Client, want.Log = `429 {"error":1}`, "429 evicted_by_test whole"
				case p.want == reset && phase == "mid body":
					want.Client, want.Log = "200 01 reset", "200 evicted_by_test cut"
				case p.want == reset:
					want.Client, want.Log = "200 012 reset", "200 evicted_by_test cut"
				case p.want == runsOn:
					want = outcome{Client: "200 012", Log: "200 via_upstream whole", Upstream: "done"}
				}
				switch {
				case phase == "request headers held", phase == "upload" && tt.modes.RequestBodyMode == buffered:
					want.Upstream = "" // it was never called
				case phase == "upload" && p.want != runsOn, phase == "end held":
					want.Upstream = got.Upstream // it ends by itself at the same moment
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				if p.want != runsOn && s.entry.Code == 429 != (s.header.Get("x-evicted") == "yes") {
					t.Errorf("header %v", s.header)
				}
			})
		}
	}
}
